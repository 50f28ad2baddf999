"""Counts what four walks through the code enter, by tracing.

`python -m tests.walks` prints the counts, `--update` writes them to tests/walk_counts.json, which
tests/test_walk.py holds them to, and `--files WALK` names the files.

A file counts if a function that is defined in it was called in this process. Grader and environment processes are not
traced. Each walk runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOME = f"{ROOT / 'lemma'}{os.sep}"
COUNTS = Path(__file__).with_name("walk_counts.json")
NOT_FUNCTIONS = {"<module>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>"}
# Of an episode with a tool, what is counted: the packages that it passes through, and the interface of engines.
EPISODE = ("rollouts/", "environments/", "engines/")
# Calls between two looks at the metrics.
LOOK = 500

Entered = set[tuple[str, str]]


class Tracer:
    """Collects the functions of Lemma that are called, with a new set for each further row of a stage in its
    metrics."""

    def __init__(self, metrics: Path | None = None, stage: str = ""):
        self.parts: list[Entered] = [set()]
        self._metrics, self._row, self._calls, self._rows = metrics, f'"stage": "{stage}"'.encode(), 0, 0
        self._known: dict[CodeType, tuple[str, str] | None] = {}

    def run(self, walk: Callable[[], Any]) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            walk()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @property
    def everything(self) -> Entered:
        return set().union(*self.parts)

    @property
    def middle_step(self) -> Entered:
        """What was entered between two rows: of all such steps the middle one by its number of files."""
        steps = sorted(self.parts[1:-1], key=lambda part: (len(files(part)), len(part)))
        return steps[len(steps) // 2]

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._known:
            self._known[code] = _place(code)
        if (place := self._known[code]) is not None:
            self.parts[-1].add(place)
        self._calls += 1
        if self._metrics is not None and self._calls % LOOK == 0:
            self._look()

    def _look(self) -> None:
        assert self._metrics is not None
        try:
            rows = self._metrics.read_bytes().count(self._row)
        except OSError:
            return
        if rows > self._rows:
            self._rows = rows
            self.parts.append(set())


def _place(code: CodeType) -> tuple[str, str] | None:
    is_function = code.co_filename.startswith(HOME) and code.co_name not in NOT_FUNCTIONS and code.co_flags & 2
    return (code.co_filename.removeprefix(HOME), code.co_qualname) if is_function else None


def files(entered: Entered) -> set[str]:
    return {file for file, _ in entered}


def counted(walk: str, entered: Entered) -> dict[str, int]:
    if walk == "episode with a tool":
        entered = {place for place in entered if place[0].startswith(EPISODE) and "/native/" not in place[0]}
    lines = sum((Path(HOME) / file).read_bytes().count(b"\n") for file in files(entered))
    return {"files": len(files(entered)), "lines": lines, "functions": len(entered)}


def grpo_step() -> dict[str, Entered]:
    """A step of GRPO that neither evaluates nor saves, and the whole command around it."""
    tracer = Tracer(Path("grpo/metrics.jsonl"), "grpo")
    recipe = ROOT / "recipes" / "small" / "math_r1_zero_grpo.yaml"
    tracer.run(lambda: command("train", str(recipe), "--set", "run.dir=grpo", "--set", "stages.grpo.steps=6"))
    return {"grpo step": tracer.middle_step, "lemma train": tracer.everything}


def supervised() -> dict[str, Entered]:
    """SFT, from the command to the final model, and `lemma eval` of that."""
    training, evaluation = Tracer(), Tracer()
    recipe = ROOT / "recipes" / "small" / "math_sft.yaml"
    training.run(lambda: command("train", str(recipe), "--set", "run.dir=sft", "--set", "stages.sft.epochs=1"))
    asked = ("--benchmarks", "arithmetic", "--limit", "8", "--max-tokens", "8", "--device", "cpu", "--to", "out")
    evaluation.run(lambda: command("eval", "sft", *asked))
    return {"sft": training.everything, "lemma eval": evaluation.everything}


def tool_episode() -> dict[str, Entered]:
    """Steps of GRPO whose episodes call a calculator."""
    from benchmarks.calculator import RECIPE, write_demonstrations

    write_demonstrations(Path("demonstrations.jsonl"), 0)
    changes = [
        "run.dir=tool", "stages.sft.data.source=demonstrations.jsonl", "stages.sft.steps=60",
        "stages.sft.batch.sequences=16",
        "stages.with_calculator.steps=4", "stages.with_calculator.batch.problems=2",
        "stages.with_calculator.environment.workers=1",
    ]  # fmt: skip
    options = [word for change in changes for word in ("--set", change)]
    command("train", str(RECIPE), *options, "--only", "sft")
    tracer = Tracer(Path("tool/metrics.jsonl"), "with_calculator")
    tracer.run(lambda: command("train", str(RECIPE), *options, "--only", "with_calculator"))
    rows = [json.loads(line) for line in Path("tool/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert max(row.get("calls/mean", 0.0) for row in rows) > 0, "no episode called the tool"
    return {"episode with a tool": set().union(*tracer.parts[1:-1])}


WALKS = {"grpo": grpo_step, "sft": supervised, "tool": tool_episode}


def command(*words: str) -> None:
    from lemma.cli import main

    code = main(list(words))
    assert code in (0, None), f"lemma {' '.join(words)} ended with {code}"


def walked(name: str, folder: Path) -> dict[str, list[list[str]]]:
    """What a walk entered, taken by a process of its own in this folder."""
    here = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LEMMA_PROGRESS": "off"}
    words = [sys.executable, "-m", "tests.walks", "--take", name]
    done = subprocess.run(words, cwd=folder, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, list[list[str]]] = json.loads((folder / "entered.json").read_text(encoding="utf-8"))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", choices=list(WALKS), help=argparse.SUPPRESS)
    parser.add_argument("--files", choices=list(WALKS))
    parser.add_argument("--update", action="store_true")
    wanted = parser.parse_args()
    if wanted.take:
        entered = {name: sorted(places) for name, places in WALKS[wanted.take]().items()}
        Path("entered.json").write_text(json.dumps(entered), encoding="utf-8")
        return
    import tempfile

    counts = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    for name in [wanted.files] if wanted.files else WALKS:
        with tempfile.TemporaryDirectory() as folder:
            for walk, places in walked(name, Path(folder)).items():
                there = {(file, function) for file, function in places}
                counts[walk] = counted(walk, there)
                print(f"{walk}: " + ", ".join(f"{number:,} {what}" for what, number in counts[walk].items()))
                if wanted.files:
                    print("\n".join(f"  {file}" for file in sorted(files(there))))
    if wanted.update:
        COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
