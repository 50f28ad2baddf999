"""The numbers of an evaluation. Every problem stays in the denominator: what could not be graded is not right. Only
where an environment could not tell, and not the model's answer is to blame, the episode is left out and counted.

N problems with K samples each. `avg@K` is the mean over all samples, `pass@k` the chance that at least one of k samples
is right (unbiased: Chen et al. 2021), `maj@k` the score of the answer that most of the first k samples give.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from lemma.evaluation.intervals import Interval, mean_interval, mean_of_intervals

Ties = Literal["average", "first"]


class Kind(Protocol):
    """What a problem is about."""

    @property
    def subject(self) -> str | None: ...
    @property
    def level(self) -> str | None: ...


class Mark(NamedTuple):
    """One sample as the metrics see it. `vote` is what counts as the same answer in a majority; None: no answer.

    `reasoning` is its length in characters, None where the format found none. `tokens` counts the whole completion.
    `lenient` is right with the answer found anywhere; `normalised` is right by the log-likelihood of options a
    character. Both are None where that was not asked, and `turns` where nothing was played.
    """

    right: bool
    known: bool = True
    vote: str | None = None
    formatted: bool = False
    truncated: bool = False
    reasoning: int | None = None
    tokens: int = 0
    reward: float | None = None
    lenient: bool | None = None
    normalised: bool | None = None
    turns: int | None = None


class Score(NamedTuple):
    """A share with its 95% interval, and how that was found."""

    value: float
    low: float
    high: float
    method: str

    def as_dict(self) -> dict[str, Any]:
        return dict(self._asdict())


@dataclass(frozen=True, slots=True)
class Summary:
    """What was found on one benchmark: `n` problems, `k` samples of each."""

    n: int
    k: int
    unknown: int
    scores: dict[str, Score]
    numbers: dict[str, float]
    """Plain means without an interval; absent where there is nothing to take the mean of."""
    subjects: dict[str, tuple[int, Score]]
    levels: dict[str, tuple[int, Score]]

    @property
    def accuracy(self) -> Score:
        return self.scores[f"avg@{self.k}"]


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that at least one of k samples is right, where `right` of n drawn were: 1 - C(n-c, k) / C(n, k)."""
    assert 1 <= k <= n and 0 <= right <= n, "k samples out of n, of which `right` are right"
    if n - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / place for place in range(n - right + 1, n + 1))


def majority(votes: Sequence[str | None], scores: Sequence[float], ties: Ties = "average") -> float:
    """The score of the most frequent vote; who gives no answer does not vote, and with no vote at all it is 0.

    `average` takes the mean over tied votes, which is what drawing one of them would give; `first` takes the one that
    was given first. The score of a vote is that of its first sample.
    """
    cast = [(vote, score) for vote, score in zip(votes, scores, strict=True) if vote is not None]
    if not cast:
        return 0.0
    counts = Counter(vote for vote, _ in cast)
    most = max(counts.values())
    first = dict(reversed(cast))
    winners = [first[vote] for vote, count in counts.items() if count == most]
    return winners[0] if ties == "first" else math.fsum(winners) / len(winners)


def sizes_up_to(k: int) -> list[int]:
    """1, 2, 4, ... and k itself."""
    return sorted({*(2**power for power in range(k.bit_length()) if 2**power <= k), k})


def summarise(
    problems: Sequence[Kind],
    marks: Sequence[Sequence[Mark]],
    *,
    ties: Ties = "average",
    measures: Mapping[str, Sequence[float]] | None = None,
) -> Summary:
    """All numbers of one benchmark. Every problem has the same number of samples.

    `measures` are those of an environment that says itself what was a success: samples whose worth is unknown are then
    left out, and nobody votes.
    """
    assert len(problems) == len(marks) > 0 and len({len(own) for own in marks}) == 1, "K samples of each problem"
    k = len(marks[0])

    counted = [own if measures is None else [mark for mark in own if mark.known] for own in marks]
    kinds = [problem for problem, own in zip(problems, counted, strict=True) if own]
    right_N = [(len(own), sum(mark.right for mark in own)) for own in counted if own]
    averages = [right / of for of, right in right_N]
    scores = {f"avg@{k}": score(averages)}
    for size in sizes_up_to(k)[1:]:
        passed = [pass_at_k(of, right, size) for of, right in right_N if of >= size]
        scores |= {f"pass@{size}": score(passed)} if passed else {}
    scores |= _won(marks, k, ties) if measures is None else {name: score(own) for name, own in measures.items()}
    for name, shares in _other_readings(marks).items():
        scores[name] = score(shares)
    scores["format"] = score([_mean([mark.formatted for mark in own]) for own in marks])
    scores["truncated"] = score([_mean([mark.truncated for mark in own]) for own in marks])
    scores["reasoning"] = score([_mean([bool(mark.reasoning) for mark in own]) for own in marks])

    def breakdown(of: Callable[[Kind], str | None]) -> dict[str, tuple[int, Score]]:
        names = [of(problem) for problem in kinds]
        groups = {}
        for group in sorted({one for one in names if one is not None}, key=_natural):
            values = [value for one, value in zip(names, averages, strict=True) if one == group]
            groups[group] = (len(values), score(values))
        return groups

    flat = [mark for own in marks for mark in own]
    return Summary(
        n=len(problems),
        k=k,
        unknown=sum(not mark.known for mark in flat),
        scores=scores,
        numbers=_plain_means(flat),
        subjects=breakdown(lambda problem: problem.subject),
        levels=breakdown(lambda problem: problem.level),
    )


def score(values: Sequence[float]) -> Score:
    """The mean of one number from 0 to 1 for each problem, and its interval."""
    return Score(_mean(values), *mean_interval(np.clip(values, 0.0, 1.0)))


def _won(marks: Sequence[Sequence[Mark]], k: int, ties: Ties) -> dict[str, Score]:
    scores = {}
    for size in sizes_up_to(k)[1:]:
        won = [majority([m.vote for m in own[:size]], [float(m.right) for m in own[:size]], ties) for own in marks]
        scores[f"maj@{size}"] = score(won)
    return scores


def _other_readings(marks: Sequence[Sequence[Mark]]) -> dict[str, list[float]]:
    """Mean over samples of each problem by other rules of what is right, where every sample was judged by them."""
    readings = {}
    for name, field in (("acc_norm", "normalised"), ("lenient", "lenient")):
        values = [[getattr(mark, field) for mark in own] for own in marks]
        if all(value is not None for own in values for value in own):
            readings[name] = [_mean(own) for own in values]
    return readings


def mean_over_benchmarks(scores: Sequence[Score]) -> Score:
    """The mean of one score of each benchmark, all with the same weight whatever their sizes."""
    values = [one.value for one in scores]
    return Score(_mean(values), *mean_of_intervals(values, [Interval(one.low, one.high, one.method) for one in scores]))


def _plain_means(marks: Sequence[Mark]) -> dict[str, float]:
    """Lengths over all samples, the right and the others; a sample without reasoning has a reasoning of length 0."""
    groups = {
        "": list(marks),
        "/right": [mark for mark in marks if mark.right],
        "/wrong": [mark for mark in marks if not mark.right],
    }
    numbers = {}
    for group, members in groups.items():
        if members:
            numbers[f"reasoning_length{group}"] = _mean([mark.reasoning or 0 for mark in members])
            numbers[f"tokens{group}"] = _mean([mark.tokens for mark in members])
        turns = [mark.turns for mark in members if mark.turns is not None]
        if turns:
            numbers[f"turns{group}"] = _mean(turns)
    rewards = [mark.reward for mark in marks if mark.reward is not None]
    return numbers | ({"reward": _mean(rewards)} if rewards else {})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _natural(name: str) -> tuple[bool, float, str]:
    """Numbers in their order, then words."""
    is_number = name.isdigit()
    return (not is_number, float(name) if is_number else 0.0, name)
