"""Intervals: exact ones against tables, and how often 95% intervals hold the truth, by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lemma.evaluation.intervals import Interval, _quantile, exact_binomial, mean_interval, mean_of_intervals

SIMULATIONS = 600


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        # Clopper and Pearson's limits, as printed in tables of the binomial distribution.
        (0, 10, 0.0, 0.3084971),
        (1, 10, 0.0025286, 0.4450161),
        (3, 30, 0.0211171, 0.2652885),
        (5, 10, 0.1870860, 0.8129140),
        (330, 500, 0.6166258, 0.7014690),
        (10, 10, 0.6915029, 1.0),
    ],
)
def test_exact_limits(right: int, total: int, low: float, high: float) -> None:
    found = exact_binomial(right, total)
    assert found == Interval(pytest.approx(low, abs=1e-6), pytest.approx(high, abs=1e-6), "exact")


@pytest.mark.parametrize(("right", "total"), [(3, 30), (40, 83), (1, 500)])
def test_exact_limits_leave_two_and_a_half_percent_on_each_side(right: int, total: int) -> None:
    low, high, _ = exact_binomial(right, total)

    def mass(counts: range, share: float) -> float:
        return math.fsum(math.comb(total, i) * share**i * (1 - share) ** (total - i) for i in counts)

    assert mass(range(right, total + 1), low) == pytest.approx(0.025, abs=1e-9)
    assert mass(range(right + 1), high) == pytest.approx(0.025, abs=1e-9)


@pytest.mark.parametrize(
    ("problems", "samples", "a", "b"),
    [
        # Problems are as hard as a beta distribution says: AIME for a weak and a middling model, AMC, Minerva,
        # MATH-500 for a good model, one hundred problems that are either easy or hopeless.
        (30, 8, 0.1, 1.0),
        (30, 32, 0.3, 1.2),
        (83, 32, 0.6, 0.6),
        (272, 4, 0.2, 0.5),
        (500, 4, 0.8, 0.2),
        (100, 8, 0.3, 0.3),
    ],
)
def test_the_interval_of_avg_at_k_holds_the_truth_95_times_in_100(
    problems: int, samples: int, a: float, b: float
) -> None:
    rng = np.random.default_rng(1)
    truth, hits = a / (a + b), 0
    for _ in range(SIMULATIONS):
        scores = rng.binomial(samples, rng.beta(a, b, problems)) / samples
        low, high, method = mean_interval(scores)
        assert (method == "bootstrap") == (not set(scores) <= {0, 1}) and low <= scores.mean() <= high
        hits += low <= truth <= high
    assert 0.93 <= hits / SIMULATIONS <= 0.97


@pytest.mark.parametrize(("problems", "truth"), [(272, 0.4), (500, 0.75), (1319, 0.6)])
def test_the_exact_interval_holds_the_truth_95_times_in_100(problems: int, truth: float) -> None:
    rng = np.random.default_rng(1)
    counts = rng.binomial(problems, truth, 8 * SIMULATIONS)
    limits = {int(count): exact_binomial(int(count), problems) for count in np.unique(counts)}
    hits = np.mean([limits[int(count)].low <= truth <= limits[int(count)].high for count in counts])
    assert 0.93 <= hits <= 0.97


def test_a_mean_over_benchmarks_holds_the_truth() -> None:
    rng = np.random.default_rng(1)
    kinds = [(30, 8, 0.3, 1.2), (200, 1, 2.0, 1.0)]
    truth, hits = np.mean([a / (a + b) for _, _, a, b in kinds]), 0
    for _ in range(SIMULATIONS):
        values, intervals = [], []
        for problems, samples, a, b in kinds:
            scores = rng.binomial(samples, rng.beta(a, b, problems)) / samples
            values.append(float(scores.mean()))
            intervals.append(mean_interval(scores))
        low, high, method = mean_of_intervals(values, intervals)
        hits += bool(method == "sum" and low <= truth <= high)
    assert 0.93 <= hits / SIMULATIONS <= 0.97


RARE = [
    # Means of 1%, 2.4%, 4.8% and 9.1%; most problems are never solved, or all of them are nearly always failed.
    (32, 0.03, 3.0),
    (32, 0.05, 2.0),
    (4, 0.05, 2.0),
    (32, 0.1, 2.0),
    (16, 1.0, 20.0),
    (8, 0.02, 0.2),
]


@pytest.mark.parametrize(("samples", "a", "b"), RARE)
def test_the_interval_of_rare_right_answers_is_on_the_safe_side(samples: int, a: float, b: float) -> None:
    rng = np.random.default_rng(1)
    truth, hits, simulations = a / (a + b), 0, 300
    for _ in range(simulations):
        low, high, _ = mean_interval(rng.binomial(samples, rng.beta(a, b, 30)) / samples)
        hits += low <= truth <= high
    assert hits / simulations >= 0.93


@pytest.mark.parametrize(("problems", "samples", "solvable"), [(30, 32, 3), (30, 4, 30), (3, 8, 3), (1, 6, 1)])
def test_one_right_answer_more_never_lowers_an_end(problems: int, samples: int, solvable: int) -> None:
    right = np.zeros(problems)
    last = mean_interval(right)
    for place in np.random.default_rng(2).permutation(np.repeat(np.arange(solvable), samples)):
        right[place] += 1
        now = mean_interval(right / samples)
        assert now.low >= last.low - 1e-8 and now.high >= last.high - 1e-8
        last = now
    assert last == exact_binomial(solvable, problems)


def test_one_of_960_right_is_hardly_surer_than_none() -> None:
    none, one = mean_interval([0.0] * 30), mean_interval([1 / 32] + [0.0] * 29)
    assert none.high == one.high == pytest.approx(1 - 0.025 ** (1 / 30)) and 0 < one.low < 1 / 960
    mirrored = mean_interval([31 / 32] + [1.0] * 29)
    assert (mirrored.low, mirrored.high) == (pytest.approx(1 - one.high), pytest.approx(1 - one.low))


def test_the_quantile_is_that_of_weights_drawn_at_random() -> None:
    """A mean of 0, 1/4, 1/2 and 1 whose shares are Dirichlet(5, 2, 1, 1/2), and the beta distribution's quantiles."""
    levels, weights = np.array([0.0, 0.25, 0.5, 1.0]), np.array([5.0, 2.0, 1.0, 0.5])
    drawn = np.random.default_rng(3).dirichlet(weights, 200_000) @ levels
    for tail in (0.025, 0.05):
        assert np.mean(drawn > _quantile(levels, weights, tail)) == pytest.approx(tail, abs=0.0015)
    for right, total in ((0, 1), (2, 3), (3, 30), (99, 100), (1, 5000)):
        found = _quantile(np.array([0.0, 1.0]), np.array([total - right, right + 1.0]), 0.025)
        assert found == pytest.approx(exact_binomial(right, total).high, abs=1e-6)


def test_an_interval_is_a_function_of_the_scores() -> None:
    scores = (np.random.default_rng(0).binomial(32, 0.3, 90) / 32).tolist()
    assert mean_interval(scores) == mean_interval(scores[::-1]) != mean_interval(scores[1:])


def test_few_problems_and_equal_scores() -> None:
    assert mean_interval([1.0]) == exact_binomial(1, 1)
    assert mean_interval([0.0, 1.0]) == exact_binomial(1, 2)
    low, high, _ = mean_interval([0.5, 0.5, 0.5])
    assert 0 < low < 0.5 < high < 1
    low, high, _ = mean_interval([0.0, 0.25])
    assert 0 < low < 0.125 < high == exact_binomial(0, 2).high


def test_one_benchmark_keeps_its_own_interval() -> None:
    one = mean_interval([0.25, 0.5, 0.0, 1.0])
    assert mean_of_intervals([0.4375], [one]) == Interval(pytest.approx(one.low), pytest.approx(one.high), "bootstrap")
