"""Functions on groups of samples: their rewards, their advantages, and writing numbers to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from lemma.algorithms.parts.loss_options import Baseline, Scale
from lemma.core.types import Group, Trajectory

if TYPE_CHECKING:
    from lemma.algorithms.algorithm import Memory


def rewards_of(group: Group) -> np.ndarray:
    """One reward per episode, however many trajectories it gave."""
    return np.array([episode[0].rewards["total"] for episode in group.episodes], dtype=np.float64)


def learns(group: Group, advantages: np.ndarray) -> bool:
    """Whether any of these advantages, one per episode, is that of an episode with trained tokens."""
    pairs = zip(group.episodes, advantages != 0, strict=True)
    return any(differs and any(one.trained_tokens for one in episode) for episode, differs in pairs)


def compared(
    rewards: Sequence[np.ndarray],
    baseline: Baseline,
    *,
    scale: Scale = "none",
    epsilon: float = 1e-6,
    unbiased: bool = True,
) -> list[np.ndarray]:
    """The advantage of each sample, (reward - baseline of its group) / deviation, for the rewards of each group."""
    from lemma.objectives.advantages import group_advantages

    flat, numbers = np.concatenate([np.zeros(0), *rewards]), numbered(rewards)
    return split_like(
        rewards,
        group_advantages(flat, numbers, baseline=baseline, scale=scale, epsilon=epsilon, unbiased=unbiased),
    )


def standardised(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The advantages of all groups together, standardised to mean 0 and standard deviation 1."""
    from lemma.objectives.advantages import standardised as of_batch

    return split_like(groups, of_batch(np.concatenate(groups))) if groups else []


def numbered(groups: Sequence[np.ndarray]) -> np.ndarray:
    """The group number of each row, over all groups concatenated."""
    return np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def split_like(groups: Sequence[np.ndarray], values: np.ndarray) -> list[np.ndarray]:
    """Values of all rows, split into one array per group."""
    ends = [*accumulate(len(group) for group in groups)]
    return [values[first:end] for first, end in pairwise([0, *ends])]


def write_advantages(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> None:
    """Write the advantage of each episode to all of its tokens."""
    for group, of_group in zip(groups, advantages, strict=True):
        for episode, advantage in zip(group.episodes, of_group, strict=True):
            for trajectory in episode:
                trajectory.token_fields["advantage"] = np.full(len(trajectory), advantage)


def of_episode(episode: Sequence[Trajectory], name: str) -> np.ndarray:
    """A token field of an episode's chosen tokens, over all of its trajectories; 0 where it is absent."""
    parts = [
        chosen(one, name) if name in one.token_fields else np.zeros(one.trained_tokens, dtype=np.float64)
        for one in episode
    ]
    return np.concatenate(parts)


def write_episodes(
    name: str, episodes: Sequence[Sequence[Trajectory]], rows: Sequence[np.ndarray] | np.ndarray
) -> None:
    """Write a number to each chosen token of each episode, from rows that may be longer; 0 elsewhere."""
    for episode, numbers in zip(episodes, rows, strict=True):
        ends = np.cumsum([one.trained_tokens for one in episode])
        write_tokens(name, episode, np.split(np.asarray(numbers)[: ends[-1]], ends[:-1]))


def write_tokens(name: str, trajectories: Sequence[Trajectory], rows: Sequence[np.ndarray] | np.ndarray) -> None:
    """Write a number to each chosen token, from rows that may be longer; 0 elsewhere."""
    for trajectory, numbers in zip(trajectories, rows, strict=True):
        trajectory.token_fields[name] = np.zeros(len(trajectory))
        trajectory.token_fields[name][trajectory.chosen_T] = numbers[: trajectory.trained_tokens]


def chosen(trajectory: Trajectory, name: str) -> np.ndarray:
    """A token field at the chosen tokens."""
    return np.asarray(trajectory.token_fields[name], dtype=np.float64)[trajectory.chosen_T]


def kl_of_samples(group: Group) -> np.ndarray:
    """The KL of each episode by its own log-probabilities: the sum of `old` - `reference` over its chosen tokens."""
    return np.array([sum(_kl(trajectory) for trajectory in episode) for episode in group.episodes])


def _kl(trajectory: Trajectory) -> float:
    difference_T = trajectory.token_fields["old"] - trajectory.token_fields["reference"]
    return float(difference_T[trajectory.chosen_T].sum())


def remember_kl(total: float, count: int, memory: Memory) -> int:
    """Remember the mean KL of these samples as `kl_seen`; returns their number."""
    if count:
        memory.numbers["kl_seen"] = total / count
    return count
