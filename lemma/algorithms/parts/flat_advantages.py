"""Advantages on flat arrays: a row is a trajectory with the number of its group.

A row without a score (NaN) has advantage 0 and is left out of all statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from lemma.algorithms.parts.advantages import SAME, divisor, of_group
from lemma.algorithms.parts.loss_options import Baseline, Scale


def standardised_groups(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The advantages of all groups together, standardised to mean 0 and standard deviation 1."""
    return split_like(groups, standardised(np.concatenate(groups))) if groups else []


def numbered(groups: Sequence[np.ndarray]) -> np.ndarray:
    """The group number of each row, over all groups concatenated."""
    return np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def split_like(groups: Sequence[np.ndarray], values: np.ndarray) -> list[np.ndarray]:
    """Values of all rows, split into one array per group."""
    ends = [*accumulate(len(group) for group in groups)]
    return [values[first:end] for first, end in pairwise([0, *ends])]


def as_rewards(values: Any) -> np.ndarray:
    """Numbers as float64, with None as NaN."""
    return np.array(values, dtype=object).astype(np.float64)


def group_advantages(
    rewards_R: Any,
    groups_R: Any,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "none",
    epsilon: float = 1e-6,
    unbiased: bool = True,
    counted_R: Any = None,
    compat: bool = False,
) -> np.ndarray:
    """Advantages (R,): (reward - baseline of its group) / (standard deviation + epsilon).

    `baseline`: nothing, the `mean` of the group, or the mean of the other rows (`leave_one_out`). `scale`: none, or the
    standard deviation of the `group` or of the whole `batch`; `unbiased` divides by one row less. `counted_R` marks the
    rows that enter the statistics (all of them, if None); if the counted rows of a group are all the same, its other
    rows are not scaled.

    `compat`: in a group with one counted row the baseline is 0, as in the original GRPO code for large models.
    """
    rewards = as_rewards(rewards_R)
    scored = ~np.isnan(rewards)
    counted = scored if counted_R is None else scored & np.asarray(counted_R, dtype=bool)
    advantages = np.zeros(len(rewards))
    by_group = epsilon if scale == "group" else None
    for rows in _members(groups_R):
        alone = compat and counted[rows].sum() == 1
        advantages[rows] = of_group(
            rewards[rows], scored[rows], counted[rows], "none" if alone else baseline, by_group, unbiased
        )
    if scale == "batch":
        advantages /= divisor(rewards[counted], epsilon, unbiased)
    return advantages


def standardised(values_R: Any, *, epsilon: float = 1e-4) -> np.ndarray:
    """Values minus their mean, divided by their standard deviation, over the whole batch; NaN becomes 0 and does not
    count.

    A mean that is 0 up to rounding is taken as 0, so that advantages of 0 stay exactly 0.
    """
    values = as_rewards(values_R)
    scored = values[~np.isnan(values)]
    is_centred = len(scored) > 0 and abs(scored.mean()) <= SAME * np.abs(scored).max()
    baseline: Baseline = "none" if is_centred else "mean"
    return group_advantages(values, np.zeros(len(values)), baseline=baseline, scale="group", epsilon=epsilon)


def is_large(advantages: np.ndarray, least: float, positive_only: bool = False) -> np.ndarray:
    """Which advantages LOOP keeps: those of at least `least` in absolute value or, with `positive_only`, in value."""
    return (advantages if positive_only else np.abs(advantages)) >= least


def _members(groups_R: Any) -> list[np.ndarray]:
    """The rows of each group, in the order in which groups first appear."""
    places: dict[Any, list[int]] = {}
    for row, group in enumerate(np.asarray(groups_R).tolist()):
        places.setdefault(group, []).append(row)
    return [np.array(rows) for rows in places.values()]
