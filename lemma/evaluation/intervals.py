"""How sure a number is: 95% intervals for means over problems, which are the unit that is drawn at random.

Where every problem scores 0 or 1, as with one sample each, the interval is the exact binomial one of Clopper and
Pearson. Otherwise it is the Bayesian bootstrap over problems (Rubin 1981), whose weights are Dirichlet(1, ..., 1), with
half a problem more that is always solved for the upper end, or never solved for the lower one. A whole one would make
it the bound of Learned-Miller and Thomas (2019), which for scores of 0 and 1 is Clopper and Pearson's, and cover up to
99%; half a one is as in Jeffreys' prior. Two rules join it to the exact interval: the upper end is never below that of
the always solved problems alone, the lower never above that of all problems solved at all; and where one end can miss
nothing, because it never comes so near to 0 or 1, the other spends the whole 5%. Nothing is drawn, and one right answer
more never lowers an end.

By simulation it covers 93% to 97%, and 96% to 98% where right answers are rare: 30 problems with means of 1% to 10%. A
bootstrap corrected for bias and skewness (BCa) covers 86% to 94% there, because a resample of few problems that were
ever solved knows nothing of those that were not (tests/evaluation/test_intervals.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
UNSEEN = 0.5
"""Problems added to those seen that may score as high, or as low, as a problem can."""
STEP = 0.08
_NORMAL = NormalDist()


class Interval(NamedTuple):
    """`method` is exact (binomial), bootstrap (Bayesian), or sum (of the intervals of several benchmarks)."""

    low: float
    high: float
    method: str


def mean_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """The interval of the mean of one value (0 to 1) per problem."""
    scores_N = np.asarray(values, dtype=np.float64)
    assert scores_N.size > 0 and scores_N.min() >= 0 and scores_N.max() <= 1, "one score from 0 to 1 for each problem"
    if np.isin(scores_N, (0.0, 1.0)).all():
        return exact_binomial(int(scores_N.sum()), scores_N.size)
    return Interval(1 - _upper_end(1 - scores_N), _upper_end(scores_N), "bootstrap")


@cache
def exact_binomial(right: int, total: int) -> Interval:
    """Clopper and Pearson: the shares under which neither this count nor a more extreme one is rarer than 2.5%."""
    tail = (1 - LEVEL) / 2
    low = 0.0 if right == 0 else _solve(total, right, tail)
    high = 1.0 if right == total else 1 - _solve(total, total - right, tail)
    return Interval(low, high, "exact")


def _solve(total: int, least: int, tail: float) -> float:
    """The share at which `least` or more of `total` has the probability `tail`; it grows with the share."""
    counts = np.arange(least, total + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, total + 1)))])
    log_ways = log_factorial[total] - log_factorial[counts] - log_factorial[total - counts]
    low, high = 0.0, 1.0
    while high - low > 1e-13:
        share = (low + high) / 2
        logs = log_ways + counts * math.log(share) + (total - counts) * math.log1p(-share)
        above = float(np.exp(logs).sum()) > tail
        low, high = (low, share) if above else (share, high)
    return (low + high) / 2


def _upper_end(scores_N: np.ndarray) -> float:
    """Also where the scores count as wrong answers, and the end is 1 less the lower one.

    Shares within `edge` of 1 can be missed from below only, because no lower end lies there: all 5% are spent above.
    """
    count = scores_N.size
    levels, counts = np.unique(np.append(scores_N, 1.0), return_counts=True)
    weights = counts.astype(np.float64)
    weights[-1] -= 1 - UNSEEN
    edge = exact_binomial(count, count).low
    end = _quantile(levels, weights, (1 - LEVEL) / 2)
    if end > edge:
        end = max(_quantile(levels, weights, 1 - LEVEL), edge)
    return max(end, exact_binomial(int((scores_N == 1).sum()), count).high)


def _quantile(levels: np.ndarray, weights: np.ndarray, tail: float) -> float:
    """The value that a mean of the levels exceeds with the probability `tail`, its shares being Dirichlet(weights)."""
    goal, total = _NORMAL.inv_cdf(1 - tail), float(weights.sum())
    mean = float(levels @ weights) / total
    deviation = math.sqrt(float(weights @ (levels - mean) ** 2) / (total * (total + 1)))
    low, high = float(levels[0]), float(levels[-1])
    value, slope, before = mean + goal * deviation, 1 / deviation, (mean, 0.0)
    for turn in range(100):
        # In normal quantiles the curve is nearly straight, so that a line leads to the next point; else by halves.
        if turn > 10 or not low < value < high:
            value = (low + high) / 2
        normal = _NORMAL.inv_cdf(1 - _exceeds(levels, weights, value))
        if abs(normal - goal) < 1e-9 or high - low < 1e-9:
            break
        if (normal - before[1]) * (value - before[0]) > 0:
            slope = (normal - before[1]) / (value - before[0])
        before = value, normal
        low, high = (value, high) if normal < goal else (low, value)
        value += (goal - normal) / slope
    return value


def _exceeds(levels: np.ndarray, weights: np.ndarray, value: float) -> float:
    """P(mean of the levels > value), which is P(sum of (level - value) * Gamma(weight) > 0): a Laplace transform turned
    back. The path of integration crosses the real axis where the integrand is least, so that it does not oscillate.
    """
    away = levels - value
    low, high = 0.0, 1 / float(away.max())
    for _ in range(20):
        cross = (low + high) / 2
        low, high = (low, cross) if float(weights @ (away / (1 - away * cross))) * cross > 1 else (cross, high)
    scale = 1 / math.sqrt(float(weights @ (away / (1 - away * cross)) ** 2) + cross**-2)
    total = float(weights.sum())
    steps = np.arange(0.0, 4 + math.log(total + 1) / 2 + 30 / total, STEP)
    path = cross + 1j * scale * np.sinh(steps)
    logs = -np.log(1 - np.outer(path, away)) @ weights - np.log(path)
    parts = np.exp(logs).real * np.cosh(steps)
    share = scale * STEP / math.pi * float(parts.sum() - parts[0] / 2)
    return min(max(share, 1e-15), 1 - 1e-15)


def mean_of_intervals(values: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """The interval of a mean over benchmarks that were measured independently: distances add as squares do."""
    assert len(values) == len(intervals) > 0
    mean = math.fsum(values) / len(values)
    below = math.hypot(*(value - one.low for value, one in zip(values, intervals, strict=True))) / len(values)
    above = math.hypot(*(one.high - value for value, one in zip(values, intervals, strict=True))) / len(values)
    method = intervals[0].method if len(intervals) == 1 else "sum"
    return Interval(max(0.0, mean - below), min(1.0, mean + above), method)
