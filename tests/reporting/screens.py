"""What a terminal shows of `lemma train` and `lemma eval` at several widths; `make screens` writes golden files."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from lemma.core.events import Event, Measured, Progressed, Said, StageEnded, StageStarted
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.results import Report, make_report
from lemma.evaluation.tables import as_table
from lemma.reporting.console import Console

FOLDER = Path(__file__).with_name("screens")
WIDTHS = (80, 100, 140)
CODE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])")


class Screen(io.StringIO):
    """A terminal that knows what rich does to it: lines, carriage returns, going up and erasing a line."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        lines, row, column, rest = [""], 0, 0, self.getvalue()
        while rest:
            code = CODE.match(rest)
            if code is not None:
                rest = rest[code.end() :]
                if code[2] == "A":
                    row = max(row - int(code[1] or 1), 0)
                elif code[2] == "K":
                    lines[row] = "" if code[1] == "2" else lines[row][:column]
                continue
            letter, rest = rest[0], rest[1:]
            if letter == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif letter == "\r":
                column = 0
            else:
                lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
                column += 1
        return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def watched(width: int) -> Iterator[tuple[Callable[..., None], Callable[[], str]]]:
    """A console on such a terminal: a function that hands it an event some seconds later, and one that looks at it."""
    clock, screen = Clock(), Screen()
    with (
        patch.dict(os.environ, {"COLUMNS": str(width), "LINES": "40", "TERM": "xterm"}),
        patch("lemma.reporting.console.time.monotonic", clock),
    ):
        console = Console(screen)
        progress = console._view._progress  # type: ignore[union-attr]
        progress.live.auto_refresh = False

        def show(event: Event, seconds: float = 0.0) -> None:
            clock.now += seconds
            console(event)

        def look() -> str:
            progress.refresh()
            return screen.text()

        yield show, look
        console.close(failed=False)


def train_screen(width: int) -> str:
    """Two stages: in the middle of the first, in an evaluation, and after the end."""
    with watched(width) as (show, look):
        show(Said("not bit-exact: on a GPU write `run.deterministic: true` for runs that repeat to the last bit"))
        show(StageStarted("sft", 0, 200))
        for step in range(1, 121):
            numbers = {"loss": 2.0 / step, "grad_norm": 0.8, "lr": 1e-5}
            show(Measured("sft", step, "train", numbers, {"tokens_per_second": 51234.0, "mfu": 0.41}), 1.5)
            show(Progressed("sft", step, 200))
        parts = [look()]
        summary = {"examples": 6400, "seconds": 301.0, "best loss": 0.0101, "model": "runs/gsm8k/stages/sft/final"}
        show(StageEnded("sft", 200, summary))
        show(StageStarted("grpo", 0, 50))
        for step in range(1, 6):
            numbers = {"reward": 0.1 * step, "loss": 0.01, "kl": 0.002, "entropy": 0.31}
            show(Measured("grpo", step, "train", numbers, {}), 42.0)
            show(Progressed("grpo", step, 50, f"accuracy {0.09 * step:.2g}"))
        for second in range(40):
            show(Progressed("evaluation", 0, 1319, "4,210 tokens/s", second / 80), 1.0)
        parts.append(look())
        numbers = {"answer_accuracy": 0.412, "answer_accuracy_low": 0.385, "answer_accuracy_high": 0.44}
        numbers |= {"format_accuracy": 0.98, "truncated": 0.03, "lenient_accuracy": 0.42}
        show(Progressed("evaluation", 1319, 1319))
        show(Measured("grpo", 5, "eval", {f"evaluation/gsm8k/{name}": value for name, value in numbers.items()}))
        show(Said("step 5: 93% of the completions are cut off at 256 tokens; raise `rollout.max_tokens`", "warning"))
        summary = {
            "problems": 7473,
            "seconds": 2100.0,
            "best answer_accuracy": 0.412,
            "model": "runs/gsm8k/stages/grpo/final",
        }
        show(StageEnded("grpo", 50, summary))
        parts.append(look())
    return _joined(parts, width)


def a_report() -> Report:
    """Three benchmarks: one written and mostly without the format, one with several samples, one weighed."""
    kinds = {"gsm8k": (40, 1), "aime24": (30, 4), "arc_challenge": (50, 1)}
    rows: dict[str, list[EvalRow]] = {}
    for name, (count, k) in kinds.items():
        weighed = name == "arc_challenge"
        rows[name] = [
            EvalRow(
                benchmark=name, problem=str(n), sample=sample, question="?", prompt="?", completion="1",
                extracted="1", gold=["1"], verdict="right" if (n + sample) % 3 == 0 else "wrong", reason="",
                format_ok=n % 20 == 0, faults=[], finish="length" if n % 9 == 0 else "stop", tokens=200 + n,
                lenient=None if weighed else "right" if (n + sample) % 2 == 0 or n % 3 == 0 else "wrong",
                reasoning=None, normalised=n % 2 == 0 if weighed else None,
            )
            for n in range(count) for sample in range(k)
        ]  # fmt: skip
    usual = {"metric": "avg", "ties": "average", "top_p": 1.0, "max_tokens": 4096, "format": {"name": "boxed"}}
    usual |= {"format_hash": "4d07932f67d492b7", "grader": "lemma 1.0+abcd", "engine": "native 1.0", "seed": 0}
    settings = {name: {**usual, "temperature": 0.6 if k > 1 else 0.0} for name, (_, k) in kinds.items()}
    settings["arc_challenge"] |= {"scoring": "likelihood", "metric": "acc_norm"}
    return make_report({"name": "runs/gsm8k/stages/grpo/final"}, settings, rows)


def eval_screen(width: int) -> str:
    """In the middle, and the table at the end."""
    with watched(width) as (show, look):
        for second in range(60):
            show(
                Progressed("evaluation", second, 160, f"{40 + second / 10:.1f}% right, 4,210 tokens/s", second / 100), 1
            )
        parts = [look()]
    return _joined([*parts, as_table(a_report(), width)], width)


def _joined(parts: list[str], width: int) -> str:
    return f"\n{'=' * width}\n".join(part.rstrip("\n") for part in parts) + "\n"


SCREENS: dict[str, Callable[[int], str]] = {"train": train_screen, "eval": eval_screen}


def golden(name: str, width: int) -> Path:
    return FOLDER / f"{name}-{width}.txt"


if __name__ == "__main__":
    for name, make in SCREENS.items():
        for width in WIDTHS:
            golden(name, width).write_text(make(width), encoding="utf-8")
