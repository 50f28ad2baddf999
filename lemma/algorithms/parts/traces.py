"""A teacher's tokens in a group: which they are, what they count in its advantages, and their probability under the
teacher."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from lemma.algorithms.parts.flat_advantages import group_advantages
from lemma.algorithms.parts.luffy_options import LuffyCompat
from lemma.core.errors import UserError
from lemma.core.types import Group, Trajectory

Statistics = Literal["group", "on_policy"]


def off_policy(trajectory: Trajectory) -> np.ndarray:
    """1 where a token comes from a teacher."""
    return trajectory.token_fields.get("off", np.zeros(len(trajectory)))


def taught(group: Group) -> np.ndarray:
    """Which episodes begin with a teacher's trace, including those whose tokens are masked."""
    return np.array([any(off_policy(t).any() for t in episode) for episode in group.episodes], dtype=bool)


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


def by_origin(
    group: Group, advantages: np.ndarray, off_factor: float, compat: LuffyCompat, group_size: int
) -> list[np.ndarray]:
    """The advantage of every token of each trajectory: its episode's, adjusted by who chose the token."""
    rows = []
    pairs = zip(group.episodes, advantages, strict=True)
    for trajectory, advantage in ((one, advantage) for episode, advantage in pairs for one in episode):
        off_T, row_T = off_policy(trajectory), np.full(len(trajectory), advantage)
        row_T = weighted_by_origin(row_T, off_T, off=off_factor, on=compat.on_policy.factor)
        if compat.prefix_reward is not None:
            row_T = with_prefix_reward(row_T, off_T, weight=compat.prefix_reward, group_size=group_size)
        rows.append(row_T)
    return rows


def target_probs(group: Group, trajectory: Trajectory) -> np.ndarray:
    """The teacher's own probability of each of its tokens; 1 elsewhere, and for the end-of-sequence token added to a
    trace."""
    places, told = _told(group, trajectory)
    given: Any = group.problem.extra.get("trace_probs")
    if len(places) and given is None:
        raise UserError(
            f"problem {group.problem.id} has no trace_probs, the teacher's probability of each token of its trace",
            fix="write `off_policy: {behaviour: one}`",
        )
    probs = np.ones(len(trajectory))
    known = np.asarray(given if len(places) else [], dtype=np.float64)
    if len(places) and told[-1] > len(known):
        raise UserError(
            f"problem {group.problem.id} has {len(known)} trace_probs for {told[-1] + 1} tokens of its trace",
            fix="give one for each token of this tokenizer, or write `off_policy: {behaviour: one}`",
        )
    is_known = told < len(known)
    probs[places[is_known]] = known[told[is_known]]
    return probs


def _told(group: Group, trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Where a teacher's tokens stand in a trajectory, and in the trace: turns may have lost their ends, and earlier
    ones may stand in other trajectories."""
    places = np.flatnonzero(off_policy(trajectory))
    turns = trajectory.token_fields.get("turn", np.zeros(len(trajectory)))[places].astype(np.int64)
    begins = np.cumsum([0, *group.trace_turns])
    return places, begins[turns] + np.arange(len(places)) - np.searchsorted(turns, turns)
