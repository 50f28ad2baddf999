"""Two evaluations on the same problems: which is better, by how much, how sure that is, and where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lemma.config.document import leaves
from lemma.core.errors import UserError, nearest
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.paired import LEVEL, Paired, holm, paired_mean, paired_test
from lemma.evaluation.results import read_report

METRICS: dict[str, Callable[[EvalRow], float]] = {
    "accuracy": lambda row: float(row.verdict == "right"),
    "format": lambda row: float(row.format_ok),
    "finished": lambda row: float(row.finish != "length"),
}
"""What can be compared: a number from 0 to 1 for every sample. What could not be graded is not right, except that an
episode whose environment could not tell is left out, as in the evaluation's own accuracy."""

# Characters of a text that are shown.
LONGEST = 1500


@dataclass(slots=True)
class Sampled:
    """A problem, the score of each of its samples, and the samples in words, where they were read from a folder."""

    question: str
    golds: tuple[str, ...]
    scores: list[float] = field(default_factory=list)
    rows: list[EvalRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The samples of an evaluation by benchmark and problem. `unknown` counts the episodes that are left out."""

    name: str
    problems: dict[str, dict[str, Sampled]]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A problem on which the two differ, by their mean scores."""

    problem: str
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One benchmark. `adjusted` is the p-value raised for the number of benchmarks that were compared."""

    benchmark: str
    test: Paired
    adjusted: float
    changes: tuple[Change, ...] = ()

    @property
    def gained(self) -> list[Change]:
        """The largest first."""
        return [change for change in self.changes if change.second > change.first]

    @property
    def lost(self) -> list[Change]:
        return [change for change in self.changes if change.second < change.first][::-1]

    @property
    def differs(self) -> bool:
        return self.test.differs and self.adjusted < 1 - LEVEL

    @property
    def words(self) -> str:
        """The verdict in a sentence."""
        test = self.test
        points, low, high = 100 * test.difference, 100 * test.low, 100 * test.high
        sure = f"p = {test.p:.2g}" if test.p >= 0.001 else "p < 0.001"
        if self.differs:
            if points < 0:
                low, high = -high, -low
            better = "B" if points > 0 else "A"
            return f"{better} is better by {abs(points):.1f} points (95% interval {low:.1f} to {high:.1f}, {sure})"
        numbers = f"B - A is {points:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}, {sure}"
        if test.differs:
            return f"not different among so many benchmarks ({numbers}, adjusted {self.adjusted:.2g})"
        return f"not different ({numbers}; {100 * test.visible:.1f} points would show eight times out of ten)"


@dataclass(frozen=True, slots=True)
class Compared:
    """All benchmarks that both have, their mean where there are several, and what makes the comparison doubtful."""

    rows: tuple[Comparison, ...]
    mean: Comparison | None
    doubts: tuple[str, ...]


def read_evaluation(folder: Path, metric: str = "accuracy") -> EvalResult:
    """A finished evaluation from the folder that `lemma eval` wrote."""
    report = read_report(folder)
    problems: dict[str, dict[str, Sampled]] = {}
    unknown: dict[str, int] = {}
    for name, rows in report.rows.items():
        may_leave_out = metric == "accuracy" and report.settings[name].get("scoring") == "environment"
        counted = [row for row in rows if row.verdict != "unknown"] if may_leave_out else rows
        unknown[name] = len(rows) - len(counted)
        for row in counted:
            own = problems.setdefault(name, {})
            one = own.setdefault(row.problem, Sampled(row.question, tuple(row.gold)))
            one.scores.append(METRICS[metric](row))
            one.rows.append(row)
    return EvalResult(str(folder), problems, report.settings, unknown)


def compare(first: EvalResult, second: EvalResult, benchmarks: Sequence[str] | None = None) -> Compared:
    """Compare what both evaluations have. Refuses where they share no problem."""
    for name in benchmarks or ():
        if name not in first.problems and name not in second.problems:
            raise UserError(
                f"no evaluation has a benchmark '{name}'", fix=nearest(name, {*first.problems, *second.problems})
            )
    names = [name for name in first.problems if name in second.problems and (benchmarks is None or name in benchmarks)]
    doubts = _different_settings(first, second, names)
    pairs: dict[str, tuple[list[str], list[list[float]], list[list[float]]]] = {}
    for name in names:
        problems, said = _shared(first, second, name)
        left_out = [one.unknown.get(name, 0) for one in (first, second)]
        if any(left_out):
            doubts.append(
                f"{name}: the environment could not score {left_out[0]} episodes of A and {left_out[1]} of B; they "
                "are left out"
            )
        doubts += said
        if problems:
            mine, theirs = ([one.problems[name][key].scores for key in problems] for one in (first, second))
            pairs[name] = problems, mine, theirs
    if not pairs:
        listed = [", ".join(sorted(one.problems)) for one in (first, second)]
        raise UserError(
            f"the two evaluations share no problem: A has {listed[0]} and B has {listed[1]}",
            fix="evaluate both on the same benchmarks",
        )
    for name in sorted({*first.problems, *second.problems} - set(pairs)):
        if benchmarks is None or name in benchmarks:
            doubts.append(f"{name} is left out: it is not in both evaluations")
    tests = {name: paired_test(mine, theirs) for name, (_, mine, theirs) in pairs.items()}
    adjusted = holm([test.p for test in tests.values()])
    rows = tuple(
        Comparison(name, test, value, _changes(*pairs[name]))
        for (name, test), value in zip(tests.items(), adjusted, strict=True)
    )
    mean = None
    if len(rows) > 1:
        test = paired_mean([(mine, theirs) for _, mine, theirs in pairs.values()])
        mean = Comparison("mean", test, test.p)
    return Compared(rows, mean, tuple(doubts))


def _shared(first: EvalResult, second: EvalResult, name: str) -> tuple[list[str], list[str]]:
    """The problems that both have with the same question and gold, and a sentence where that is not all of them."""
    mine, theirs = first.problems[name], second.problems[name]
    both = [one for one in mine if one in theirs]
    asked = [one for one in both if mine[one].question == theirs[one].question]
    same = [one for one in asked if mine[one].golds == theirs[one].golds]
    said = []
    if len(both) < max(len(mine), len(theirs)):
        said.append(f"{name}: only {len(both)} problems are in both (A has {len(mine)}, B has {len(theirs)})")
    if len(asked) < len(both):
        said.append(f"{name}: {len(both) - len(asked)} problems have another question in B and are left out")
    if len(same) < len(asked):
        said.append(f"{name}: {len(asked) - len(same)} problems have another gold answer in B and are left out")
    return same, said


HARMLESS = {"seed", "n", "k", "engine", "device", "metric", "ties"}
"""Settings in which two evaluations may differ without a word."""


def _different_settings(first: EvalResult, second: EvalResult, names: Sequence[str]) -> list[str]:
    """A sentence for every setting that differs, with the benchmarks for which it does."""
    benchmarks: dict[str, list[str]] = {}
    for name in names:
        mine, theirs = (leaves(one.settings.get(name, {})) for one in (first, second))
        for key in sorted({*mine, *theirs}) if mine and theirs else ():
            if key.split(".")[0] not in HARMLESS and mine.get(key) != theirs.get(key):
                said = f"{key} differs: {mine.get(key)} in A, {theirs.get(key)} in B"
                benchmarks.setdefault(said, []).append(name)
    return [f"{said} ({', '.join(where)})" for said, where in benchmarks.items()]


def _changes(
    problems: Sequence[str], mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> tuple[Change, ...]:
    """The problems on which the two differ, the largest gain of B first, the largest loss last."""
    changes = [
        Change(problem, sum(a) / len(a), sum(b) / len(b))
        for problem, a, b in zip(problems, mine, theirs, strict=True)
        if sum(a) / len(a) != sum(b) / len(b)
    ]
    return tuple(sorted(changes, key=lambda change: (change.first - change.second, change.problem)))


def in_words(row: Comparison) -> str:
    test = row.test
    return (
        f"{row.benchmark}: {row.words}\n"
        f"    A {100 * test.first:.1f}%, B {100 * test.second:.1f}% on {test.problems:,} problems; "
        f"B gains {test.gained:,} and loses {test.lost:,}"
    )


def changes_of(row: Comparison, count: int) -> list[tuple[str, Change]]:
    """So many of the problems gained and lost, the largest changes first."""
    return [("gained", one) for one in row.gained[:count]] + [("lost", one) for one in row.lost[:count]]


def shown_change(
    what: str, change: Change, benchmark: str, first: EvalResult, second: EvalResult, score: Callable[[EvalRow], float]
) -> str:
    """A problem on which the two differ: the question, the gold and an answer of each."""
    asked = first.problems[benchmark][change.problem]
    golds = " or ".join(asked.golds)
    lines = [
        f"\n{what} {change.problem}: A {change.first:.0%}, B {change.second:.0%}; the answer is {golds}",
        *_indented("question", asked.question),
    ]
    best, worst = (max, min) if change.first > change.second else (min, max)
    for name, evaluation, choose in (("A", first, best), ("B", second, worst)):
        row = choose(evaluation.problems[benchmark][change.problem].rows, key=score)
        lines += _indented(f"{name}, {row.verdict}, read as {row.extracted}", row.completion)
    return "\n".join(lines)


def _indented(title: str, text: str) -> list[str]:
    """A title and a text below it; of a long text the beginning and the end."""
    text = text.strip()
    if len(text) > LONGEST:
        left_out = len(text) - LONGEST
        text = f"{text[: LONGEST // 3]}\n[... {left_out:,} characters ...]\n{text[-2 * LONGEST // 3 :]}"
    return [f"    {title}:", *(f"        {line}" for line in text.splitlines())]
