"""One sample of an evaluation in words, and its lines in the files of samples."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from lemma.evaluation.metrics import Mark
from lemma.grading.normal_form import normalise, squeezed

LONGEST_VOTE = 500


@dataclass(slots=True)
class EvalRow:
    """One sample in words. `tolerance` is the problem's own, where it has one; `lenient` is the verdict with the answer
    found anywhere. `options` are the log-likelihoods of a multiple-choice question's options, where those decide, and
    `normalised` says whether the likeliest one a character is right. `turns` are those of an episode: what was `said`,
    what was `heard` in reply, and the `tokens` of the turn; `completion` is then what was said last."""

    benchmark: str
    problem: str
    sample: int
    question: str
    prompt: str
    completion: str
    extracted: str | None
    gold: list[str]
    verdict: str
    reason: str
    format_ok: bool
    faults: list[str]
    finish: str
    tokens: int
    reasoning: str | None
    reward: float | None = None
    subject: str | None = None
    level: str | None = None
    tolerance: float | None = None
    lenient: str | None = None
    options: list[float] | None = None
    normalised: bool | None = None
    turns: list[dict[str, Any]] | None = None
    lines: tuple[bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)
    """`lines_of`, if they were written in advance; `replace` drops them."""

    @property
    def mark(self) -> Mark:
        right = self.verdict == "right"
        vote = self.extracted and squeezed(normalise(self.extracted[:LONGEST_VOTE]))
        return Mark(
            right=right,
            known=self.verdict != "unknown",
            # Right answers are one answer, however they are written.
            vote="right" if right else f"not {vote}" if vote else None,
            formatted=self.format_ok,
            truncated=self.finish == "length",
            reasoning=None if self.reasoning is None else len(self.reasoning),
            tokens=self.tokens,
            reward=self.reward,
            lenient=None if self.lenient is None else self.lenient == "right",
            normalised=self.normalised,
            turns=None if self.turns is None else len(self.turns),
        )


COLUMNS = tuple(one.name for one in fields(EvalRow) if one.init)
AT_START = COLUMNS[: COLUMNS.index("lenient")]
"""Columns that are known as soon as a sample is graded."""
SOMETIMES = ("options", "normalised", "turns")
"""Columns that a sample has only where it holds something there."""


QUESTION_COLUMNS = ("benchmark", "problem", "sample", "question", "target", "prediction", "is_correct", "reason")


def lines_of(row: EvalRow) -> tuple[bytes, bytes]:
    """A row's line in samples.jsonl up to the lenient verdict, which comes last; and its line in questions.csv."""
    start = json.dumps({name: getattr(row, name) for name in AT_START}, ensure_ascii=False)[:-1].encode()
    gold, is_right = " | ".join(row.gold), row.verdict == "right"
    asked = (row.benchmark, row.problem, row.sample, row.question)
    return start, csv_line((*asked, gold, row.extracted, is_right, row.reason))


def end_of_line(row: EvalRow) -> bytes:
    sometimes = {name: value for name in SOMETIMES if (value := getattr(row, name)) is not None}
    return _with_lenient(row.lenient, sometimes) if sometimes else _lenient_alone(row.lenient)


def _with_lenient(lenient: str | None, sometimes: Mapping[str, Any]) -> bytes:
    return f", {json.dumps({'lenient': lenient, **sometimes}, ensure_ascii=False)[1:]}\n".encode()


@cache
def _lenient_alone(lenient: str | None) -> bytes:
    return _with_lenient(lenient, {})


def csv_line(values: Sequence[Any]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()
