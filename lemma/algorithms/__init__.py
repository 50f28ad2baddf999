"""Algorithms of reinforcement learning: one small file each, and the one registry of them."""

from lemma.algorithms.base import Algorithm, Memory, rewards_of

ALGORITHMS: dict[str, type[Algorithm]] = {}

__all__ = ["ALGORITHMS", "Algorithm", "Memory", "rewards_of"]
