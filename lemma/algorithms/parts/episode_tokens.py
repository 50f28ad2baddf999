"""Numbers at the tokens of episodes, which may be several trajectories: reading, writing, and the KL they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lemma.core.types import Group, Trajectory

if TYPE_CHECKING:
    from lemma.algorithms.algorithm import AlgorithmState


def of_episode(episode: Sequence[Trajectory], name: str) -> np.ndarray:
    """A token field of an episode's chosen tokens, over all of its trajectories; 0 where it is absent."""
    return np.concatenate([one.read(name) for one in episode])


def write_episodes(
    name: str, episodes: Sequence[Sequence[Trajectory]], rows: Sequence[np.ndarray] | np.ndarray
) -> None:
    """Write a number to each chosen token of each episode, from rows that may be longer; 0 elsewhere."""
    for episode, numbers in zip(episodes, rows, strict=True):
        ends = np.cumsum([one.trained_tokens for one in episode])
        for trajectory, part in zip(episode, np.split(np.asarray(numbers)[: ends[-1]], ends[:-1]), strict=True):
            trajectory.write(name, part)


def kl_of_samples(group: Group) -> np.ndarray:
    """The KL of each episode by its own log-probabilities: the sum of `old` - `reference` over its chosen tokens."""
    return np.array([sum(_kl(trajectory) for trajectory in episode) for episode in group.episodes])


def _kl(trajectory: Trajectory) -> float:
    difference_T = trajectory.token_fields["old"] - trajectory.token_fields["reference"]
    return float(difference_T[trajectory.loss_mask_T].sum())


def remember_kl(total: float, count: int, memory: AlgorithmState) -> int:
    """Remember the mean KL of these samples as `kl_seen`; returns their number."""
    if count:
        memory.numbers["kl_seen"] = total / count
    return count
