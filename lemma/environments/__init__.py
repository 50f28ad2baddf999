"""Environments: what answers the policy between its turns, and what an episode was worth in the end."""

from lemma.core.types import Outcome
from lemma.environments.custom_world import CustomWorld
from lemma.environments.environment import Environment, EnvironmentOptions, Reply, Said
from lemma.environments.higher_lower import HigherLower
from lemma.environments.single_turn import SingleTurn

ENVIRONMENTS: dict[str, type[EnvironmentOptions]] = {
    "single_turn": SingleTurn,
    "higher_lower": HigherLower,
    "custom": CustomWorld,
}

__all__ = [
    "ENVIRONMENTS",
    "CustomWorld",
    "Environment",
    "EnvironmentOptions",
    "HigherLower",
    "Outcome",
    "Reply",
    "Said",
    "SingleTurn",
]
