"""Data files out of data: rows whose response is right, and those of LUFFY."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lemma.config.document import parse_value
from lemma.core.errors import UserError
from lemma.core.types import Demonstration
from lemma.data.choices import as_asked
from lemma.data.data_options import DataOptions
from lemma.data.held_out import split_share
from lemma.data.load_rows import load_demonstrations, load_rows
from lemma.data.prepared import correct_only, luffy_rows, write_luffy
from lemma.formats import make_format
from lemma.formats.think_boxed import ThinkBoxed
from lemma.grading import grade


def right_demonstrations(options: DataOptions, seed: int, fmt: str | None = None) -> tuple[list[Demonstration], int]:
    """Those whose response gives the right answer, in this format where one is named, and how many there are in all."""
    items = load_demonstrations(options, seed)
    kept = correct_only(items, _gives_answer if fmt is None else _in_format_and_right(fmt))
    if not kept:
        right = len(correct_only(items, _gives_answer)) if fmt is not None else 0
        if right:
            raise UserError(
                f"{right:,} of the {len(items):,} responses are right, but none keeps the format {fmt}",
                fix="leave --format out, or name the format they are written in",
            )
        raise UserError(f"none of the {len(items):,} responses gives the right answer", fix="check the source")
    return kept, len(items)


def _gives_answer(response: str, golds: Sequence[str]) -> bool:
    return any(grade(response, gold).right for gold in golds)


def _in_format_and_right(name: str) -> Callable[[str, Sequence[str]], bool]:
    fmt = make_format(parse_value(name))

    def check(response: str, golds: Sequence[str]) -> bool:
        parsed = fmt.parse(response.removeprefix(fmt.opening))
        return parsed.ok and _gives_answer(parsed.answer or "", golds)

    return check


def luffy_files(
    folder: Path, source: DataOptions, others: DataOptions | float, seed: int, split: str
) -> Iterator[tuple[Path, int]]:
    """Write LUFFY's files, the third with the problems of `others` or a share of the source; each with its rows."""
    if isinstance(others, float) and not 0 < others < 1:
        raise UserError(f"--hold-out {others} is not a share", fix="write a number between 0 and 1")
    training = load_rows(source, seed)
    if isinstance(others, DataOptions):
        rest = load_rows(others, seed)
    else:
        training, rest = split_share(training, others, seed)
    system = ThinkBoxed().default_system

    def rows(items: Sequence[Any]) -> list[dict[str, Any]]:
        return luffy_rows([as_asked(item) for item in items], system, _think_target, split)

    for name, count in write_luffy(folder, rows(training), rows(rest)).items():
        yield folder / name, count


def _think_target(item: Demonstration) -> str:
    """A teacher's response with its thoughts in think tags, as LUFFY's prompt expects them."""
    fmt = ThinkBoxed()
    if item.response is not None and "</think>" in item.response:
        return fmt.opening + item.response.removeprefix(fmt.opening)
    thoughts, answer = item.response or item.reasoning or "", item.answer or item.problem.gold
    assert answer is not None, "rows without an answer are refused before"
    return fmt.opening + fmt.compose(thoughts.strip(), answer)
