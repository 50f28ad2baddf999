"""Training data against benchmarks: which rows repeat a problem that the model will be measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lemma.core.types import Problem
from lemma.data.contamination import LONG, find_matches, words_of
from lemma.evaluation.benchmarks import Loaded


class Repeat(NamedTuple):
    """A training row, by place, and the benchmark problem that it repeats."""

    row: int
    benchmark: str
    problem: Problem
    kind: Literal["exact", "overlap"]
    share: float


@dataclass(frozen=True, slots=True)
class Count:
    """What one benchmark has in common with the data."""

    benchmark: str
    problems: int
    exact_rows: int
    overlap_rows: int
    repeated: int
    """Problems of the benchmark that at least one row repeats."""

    @property
    def words(self) -> str:
        if not self.repeated:
            return f"{self.benchmark}: none of its {self.problems:,} problems is in the data"
        repeats = f"{self.repeated:,} of its {self.problems:,} problems ({self.repeated / self.problems:.1%})"
        rows = f"rows word for word: {self.exact_rows:,}, nearly so: {self.overlap_rows:,}"
        return f"{self.benchmark}: {repeats} found in the data; {rows}"


@dataclass(frozen=True, slots=True)
class Contamination:
    """Which of `rows` training rows repeat problems of benchmarks."""

    rows: int
    repeats: tuple[Repeat, ...]
    counts: tuple[Count, ...]

    @property
    def flagged(self) -> frozenset[int]:
        return frozenset(repeat.row for repeat in self.repeats)


def check_rows(rows: Sequence[Problem], benchmarks: Sequence[Loaded]) -> Contamination:
    """Compare every training row with every problem of every benchmark."""
    owners = [(loaded.name, problem) for loaded in benchmarks for problem in loaded.problems]
    matches = find_matches([asked(row) for row in rows], [asked(problem) for _, problem in owners])
    repeats = tuple(Repeat(match.row, *owners[match.problem], match.kind, match.share) for match in matches)
    return Contamination(len(rows), repeats, tuple(_count(loaded, repeats) for loaded in benchmarks))


def _count(loaded: Loaded, repeats: Sequence[Repeat]) -> Count:
    own = [repeat for repeat in repeats if repeat.benchmark == loaded.name]
    exact = {repeat.row for repeat in own if repeat.kind == "exact"}
    near = {repeat.row for repeat in own} - exact
    return Count(loaded.name, len(loaded.problems), len(exact), len(near), len({repeat.problem.id for repeat in own}))


def asked(problem: Problem) -> str:
    """What a problem asks. Options count where the question alone says little, in the order of the alphabet, because
    benchmarks draw theirs."""
    if not problem.choices:
        return " ".join(message.content for message in problem.messages if message.role == "user")
    question = problem.question.rpartition(f"\n\nA) {problem.choices[0]}")[0] or problem.question
    if len(words_of(question)) >= LONG:
        return question
    return "\n".join([question, *sorted(problem.choices)])
