"""LUFFY's advantages: whose rewards form the baseline, and how a teacher's tokens count."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from lemma.objectives.advantages import group_advantages

Statistics = Literal["group", "on_policy"]


def mixed_advantages(
    rewards_R: Any,
    groups_R: Any,
    off_R: Any,
    *,
    statistics: Statistics = "group",
    use_std: bool = False,
    epsilon: float = 1e-6,
    compat: bool = False,
) -> np.ndarray:
    """Advantages (R,) of groups in which some rows (`off_R`) come from a teacher.

    `group` takes mean and deviation over all rows (the original's `grpo`), `on_policy` over the policy's own rows
    (`grpo_split`) and applies them to all. A group without any such row has advantage 0.
    """
    counted = None if statistics == "group" else ~np.asarray(off_R, dtype=bool)
    scale: Literal["group", "none"] = "group" if use_std else "none"
    return group_advantages(rewards_R, groups_R, scale=scale, epsilon=epsilon, counted_R=counted, compat=compat)


def weighted_by_origin(advantage_T: np.ndarray, off_T: np.ndarray, *, off: float = 1.0, on: float = 1.0) -> np.ndarray:
    """Advantages of tokens times a factor for a teacher's tokens and one for the policy's own."""
    return advantage_T * np.where(off_T > 0, off, on)


def with_prefix_reward(advantage_T: np.ndarray, off_T: np.ndarray, *, weight: float, group_size: int) -> np.ndarray:
    """Advantages in which every token of a teacher has weight / group size, whatever reward its sequence got."""
    return np.where(off_T > 0, weight / group_size, advantage_T)
