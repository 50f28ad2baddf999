"""Intervals: exact ones against tables, and how often 95% intervals hold the truth, by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lemma.evaluation.intervals import Interval, exact_binomial, mean_interval, mean_of_intervals

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
    for number in range(SIMULATIONS):
        scores = rng.binomial(samples, rng.beta(a, b, problems)) / samples
        low, high, method = mean_interval(scores, 0, "simulation", number)
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
    for number in range(SIMULATIONS):
        values, intervals = [], []
        for problems, samples, a, b in kinds:
            scores = rng.binomial(samples, rng.beta(a, b, problems)) / samples
            values.append(float(scores.mean()))
            intervals.append(mean_interval(scores, 0, "simulation", number))
        low, high, method = mean_of_intervals(values, intervals)
        hits += bool(method == "sum" and low <= truth <= high)
    assert 0.93 <= hits / SIMULATIONS <= 0.97


def test_an_interval_is_a_function_of_scores_and_name() -> None:
    scores = (np.random.default_rng(0).binomial(32, 0.3, 90) / 32).tolist()
    first, second = mean_interval(scores, 3, "gsm8k", "avg"), mean_interval(scores[::-1], 3, "gsm8k", "avg")
    assert first == second != mean_interval(scores, 3, "math", "avg")


def test_few_problems_and_equal_scores() -> None:
    assert mean_interval([1.0], 0, "x") == exact_binomial(1, 1)
    assert mean_interval([0.0, 1.0], 0, "x") == exact_binomial(1, 2)
    low, high, _ = mean_interval([0.5, 0.5, 0.5], 0, "x")
    assert 0 < low < 0.5 < high < 1
    low, high, _ = mean_interval([0.0, 0.25], 0, "x")
    assert 0 <= low < 0.125 < high <= 0.25


def test_one_benchmark_keeps_its_own_interval() -> None:
    one = mean_interval([0.25, 0.5, 0.0, 1.0], 0, "x")
    assert mean_of_intervals([0.4375], [one]) == Interval(pytest.approx(one.low), pytest.approx(one.high), "bootstrap")
