"""Advantages from the rewards of groups, and the tokens that they are written to.

On flat arrays, a row is a trajectory with the number of its group. A row without a score (NaN) has advantage 0 and is
left out of all statistics. Every row of a group whose rewards are all the same has advantage 0 too, as does a group of
one, which has nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from lemma.algorithms.parts.loss_options import Baseline, Scale
from lemma.core.types import Group

SAME = 1e-9
"""Rewards that differ by less than this, relative to the largest of them or to 1, count as equal: summing in another
order causes differences of this size."""


def rewards_of(group: Group) -> np.ndarray:
    """One reward per episode, however many trajectories it gave."""
    return np.array([episode[0].rewards["total"] for episode in group.episodes], dtype=np.float64)


def compared(
    rewards: Sequence[np.ndarray],
    baseline: Baseline,
    *,
    scale: Scale = "none",
    epsilon: float = 1e-6,
    unbiased: bool = True,
) -> list[np.ndarray]:
    """The advantage of each sample, (reward - baseline of its group) / deviation, for the rewards of each group."""
    advantages = []
    for group in rewards:
        scored = ~np.isnan(group)
        advantages.append(_of_group(group, scored, scored, baseline, epsilon if scale == "group" else None, unbiased))
    if scale == "batch":
        flat = np.concatenate([np.zeros(0), *rewards])
        by = divisor(flat[~np.isnan(flat)], epsilon, unbiased)
        advantages = [group / by for group in advantages]
    return advantages


def standardised_groups(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The advantages of all groups together, standardised to mean 0 and standard deviation 1."""
    return split_like(groups, standardised(np.concatenate(groups))) if groups else []


def write_advantages(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> None:
    """Write the advantage of each episode to all of its tokens."""
    for group, of_group in zip(groups, advantages, strict=True):
        for episode, advantage in zip(group.episodes, of_group, strict=True):
            for trajectory in episode:
                trajectory.token_fields["advantage"] = np.full(len(trajectory), advantage)


def learns(group: Group, advantages: np.ndarray) -> bool:
    """Whether any of these advantages, one per episode, is that of an episode with trained tokens."""
    pairs = zip(group.episodes, advantages != 0, strict=True)
    return any(differs and any(one.trained_tokens for one in episode) for episode, differs in pairs)


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
        advantages[rows] = _of_group(
            rewards[rows], scored[rows], counted[rows], "none" if alone else baseline, by_group, unbiased
        )
    if scale == "batch":
        advantages /= divisor(rewards[counted], epsilon, unbiased)
    return advantages


def divisor(rewards: np.ndarray, epsilon: float, unbiased: bool = True) -> float:
    """What scaled advantages are divided by; for rewards that are all the same, 1 stands in for the deviation."""
    return (_deviation(rewards, unbiased) or 1.0) + epsilon


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


def _of_group(
    rewards: np.ndarray,
    scored: np.ndarray,
    counted: np.ndarray,
    baseline: Baseline,
    epsilon: float | None,
    unbiased: bool,
) -> np.ndarray:
    """The advantages of one group: those rows have one that are `scored`, compared with those that are `counted`. They
    are scaled by the deviation of these where an `epsilon` is given."""
    values = rewards[counted]
    if not len(values):
        return np.zeros(len(rewards))
    by = 1.0 if epsilon is None else divisor(values, epsilon, unbiased)
    return np.where(scored, (rewards - _baseline(rewards, counted, baseline)) / by, 0.0)


def _baseline(rewards: np.ndarray, counted: np.ndarray, kind: Baseline) -> np.ndarray:
    """What each row of a group is compared with, from those that are counted."""
    values = rewards[counted]
    if kind == "none":
        return np.zeros(len(rewards))
    if _same(values):  # the mean of equal numbers may differ from them by rounding
        return np.where(counted, rewards, values[0])
    if kind == "mean":
        return np.full(len(rewards), values.mean())
    others = (values.sum() - rewards) / (len(values) - 1)
    return np.where(counted, others, values.mean())


def _deviation(values: np.ndarray, unbiased: bool) -> float:
    return 0.0 if _same(values) else float(values.std(ddof=1 if unbiased else 0))


def _same(values: np.ndarray) -> bool:
    if len(values) < 2:
        return True
    low, high = float(values.min()), float(values.max())
    return high - low <= SAME * max(1.0, abs(low), abs(high))
