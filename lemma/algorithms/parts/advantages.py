"""Advantages from the rewards of groups, and the tokens that they are written to.

A sample without a score (NaN) has advantage 0 and is left out of all statistics. Every sample of a group whose rewards
are all the same has advantage 0 too, as does a group of one, which has nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        advantages.append(of_group(group, scored, scored, baseline, epsilon if scale == "group" else None, unbiased))
    if scale == "batch":
        flat = np.concatenate([np.zeros(0), *rewards])
        by = divisor(flat[~np.isnan(flat)], epsilon, unbiased)
        advantages = [group / by for group in advantages]
    return advantages


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


def divisor(rewards: np.ndarray, epsilon: float, unbiased: bool = True) -> float:
    """What scaled advantages are divided by; for rewards that are all the same, 1 stands in for the deviation."""
    deviation = 0.0 if _same(rewards) else float(rewards.std(ddof=1 if unbiased else 0))
    return (deviation or 1.0) + epsilon


def of_group(
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


def _same(values: np.ndarray) -> bool:
    if len(values) < 2:
        return True
    low, high = float(values.min()), float(values.max())
    return high - low <= SAME * max(1.0, abs(low), abs(high))
