"""Is one set of scores better than another on the same problems? A difference, its 95% interval and a p-value.

The unit is the problem: its score is the mean over its samples, and the two models are compared problem by problem, so
that hard and easy problems cancel. The p-value is that of the sign-flip test (if the models were alike, each problem's
difference could as well have the other sign); it is exact wherever scores are counts of right samples, and for one
sample a problem it is McNemar's exact test. The interval is that of the mean difference with the pseudo-observations of
Agresti and Min (2005), so that it does not collapse when few problems differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from lemma.core.random import stream

LEVEL = 0.95
POWER = 0.8
EXACT_WORK = 2_000_000_000
DRAWS = 20_000


@dataclass(frozen=True, slots=True)
class Paired:
    """Two models on the same problems. Scores are shares; `difference` is the second less the first."""

    problems: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    p: float
    gained: int
    lost: int
    visible: float
    """The difference that data of this spread would show eight times out of ten."""

    @property
    def differs(self) -> bool:
        """Both the test and the interval say so."""
        return self.p < 1 - LEVEL and not self.low <= 0 <= self.high


def paired_test(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Paired:
    """Compare the scores (0 to 1) of each problem's samples; the numbers of samples may differ."""
    assert len(first) == len(second) > 0, "the same problems, at least one"
    (sums_a, sizes_a), (sums_b, sizes_b) = _sums(first), _sums(second)
    a, b = sums_a / sizes_a, sums_b / sizes_b
    d = b - a
    low, high, error = interval(d, 1 / min(sizes_a.min(), sizes_b.min()))
    counts = _on_lattice(sums_a, sizes_a, sums_b, sizes_b)
    p = sign_flip_exact(counts) if counts is not None else sign_flip_drawn(d)
    return Paired(
        problems=len(d),
        first=float(a.mean()),
        second=float(b.mean()),
        difference=float(d.mean()),
        low=low,
        high=high,
        p=p,
        gained=int((d > 0).sum()),
        lost=int((d < 0).sum()),
        visible=_visible(error),
    )


def paired_mean(pairs: Sequence[tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]]) -> Paired:
    """The mean over several benchmarks, each of which weighs the same whatever its size."""
    tests = [paired_test(first, second) for first, second in pairs]
    weighted, errors, shifts = [], [], []
    for (first, second), test in zip(pairs, tests, strict=True):
        (sums_a, sizes_a), (sums_b, sizes_b) = _sums(first), _sums(second)
        d = sums_b / sizes_b - sums_a / sizes_a
        weighted.append(d / (test.problems * len(pairs)))
        errors.append(((test.high - test.low) / 2 / len(pairs)) ** 2)
        shifts.append((test.high + test.low) / 2 / len(pairs))
    half, middle = math.sqrt(math.fsum(errors)), math.fsum(shifts)
    flat = np.concatenate(weighted)
    return Paired(
        problems=len(flat),
        first=math.fsum(test.first for test in tests) / len(tests),
        second=math.fsum(test.second for test in tests) / len(tests),
        difference=float(flat.sum()),
        low=min(middle - half, float(flat.sum())),
        high=max(middle + half, float(flat.sum())),
        p=sign_flip_drawn(flat),
        gained=sum(test.gained for test in tests),
        lost=sum(test.lost for test in tests),
        visible=_visible(half / NormalDist().inv_cdf((1 + LEVEL) / 2)),
    )


def interval(d: np.ndarray, smallest: float) -> tuple[float, float, float]:
    """The 95% interval of the mean of per-problem differences, and its standard error.

    Two problems are added: one without a difference and one half for each side of the smallest difference that a
    sample can make. For one sample a problem this is Agresti and Min's interval.
    """
    count = len(d) + 2
    middle = float(d.sum()) / count
    variance = (float((d**2).sum()) + smallest**2) / count - middle**2
    error = math.sqrt(max(variance, 0.0) / count)
    half = t_quantile((1 + LEVEL) / 2, count - 1) * error
    mean = float(d.mean())
    return max(-1.0, min(middle - half, mean)), min(1.0, max(middle + half, mean)), error


def t_quantile(share: float, freedom: int) -> float:
    """Student's quantile by the expansion in 1/freedom (Abramowitz and Stegun 26.7.5): 0.1% off at 5 degrees."""
    z, n = NormalDist().inv_cdf(share), freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / n**power for power, term in enumerate(terms, start=1))


def _visible(error: float) -> float:
    normal = NormalDist()
    return (normal.inv_cdf((1 + LEVEL) / 2) + normal.inv_cdf(POWER)) * error


def _sums(scores: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of each problem's scores, and how many there are."""
    sizes = np.array([len(own) for own in scores])
    if (sizes == sizes[0]).all():
        return np.asarray(scores, dtype=np.float64).sum(axis=1), sizes
    return np.array([math.fsum(own) for own in scores]), sizes


def _on_lattice(sums_a: np.ndarray, sizes_a: np.ndarray, sums_b: np.ndarray, sizes_b: np.ndarray) -> np.ndarray | None:
    """The differences as whole numbers of a common unit; None where scores are not counts, or there are too many."""
    unit = math.lcm(*{*sizes_a.tolist(), *sizes_b.tolist()})
    if unit > 10_000:
        return None
    counts = sums_b * (unit // sizes_b) - sums_a * (unit // sizes_a)
    whole = np.rint(counts).astype(np.int64)
    if not np.allclose(counts, whole, rtol=0, atol=1e-6):
        return None
    return whole if len(whole) * int(np.abs(whole).sum()) <= EXACT_WORK else None


def sign_flip_exact(counts: np.ndarray) -> float:
    """The share of all sign patterns whose sum is at least as far from 0, without enumerating them.

    Problems of one magnitude together give a binomial; the sum of all is their convolution. Two-sided.
    """
    sizes, numbers = np.unique(np.abs(counts[counts != 0]), return_counts=True)
    if len(sizes) == 0:
        return 1.0
    unit = int(np.gcd.reduce(sizes))
    sizes = sizes // unit
    total = int((sizes * numbers).sum())
    spread = np.ones(1)
    for size, number in zip(sizes.tolist(), numbers.tolist(), strict=True):
        wider = np.zeros(len(spread) + size * number)
        for place, share in enumerate(_binomial(number)):
            if share > 0:
                wider[place * size : place * size + len(spread)] += share * spread
        spread = wider
    positive = int(counts[counts > 0].sum()) // unit
    far = max(positive, total - positive)
    return float(min(1.0, 2 * math.fsum(spread[far:]))) if 2 * far > total else 1.0


def _binomial(number: int) -> np.ndarray:
    """The distribution of heads in `number` throws."""
    logs = np.array(
        [math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1) for k in range(number + 1)]
    )
    return np.exp(logs - number * math.log(2))


def sign_flip_drawn(d: np.ndarray) -> float:
    """The same share estimated from random sign patterns; the observed one counts as one of them."""
    d = d[d != 0]
    if len(d) == 0:
        return 1.0
    random = stream(0, "compare", "sign flips")
    observed, at_least, block = abs(float(d.sum())), 0, max(1, 20_000_000 // len(d))
    slack = 1e-9 * float(np.abs(d).sum())
    for start in range(0, DRAWS, block):
        rows = min(block, DRAWS - start)
        bits = np.unpackbits(random.integers(0, 256, (rows, -(-len(d) // 8)), dtype=np.uint8), axis=1, count=len(d))
        sums = 2 * (bits @ d) - d.sum()
        at_least += int((np.abs(sums) >= observed - slack).sum())
    return (at_least + 1) / (DRAWS + 1)


def holm(values: Sequence[float]) -> list[float]:
    """P-values raised so that among all of them together a false alarm stays as rare as in one (Holm, 1979)."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    out, largest = [1.0] * len(values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, values[place] * (len(values) - rank)))
        out[place] = largest
    return out
