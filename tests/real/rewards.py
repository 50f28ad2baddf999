"""Rewards that a small model earns some of from the start."""

from __future__ import annotations

from lemma.rewards import RewardInput

DIGITS = f"{__file__}:digits"
LETTERS = f"{__file__}:letters"


def digits(item: RewardInput) -> float:
    """The share of digits among all characters."""
    return sum(character.isdigit() for character in item.completion) / max(1, len(item.completion))


def letters(item: RewardInput) -> float:
    """A tenth for each letter: hardly two samples earn the same."""
    return sum(character.isalpha() for character in item.completion) / 10
