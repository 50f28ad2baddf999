"""Rewards for length and repetition, on the ids of all that was said: a completion, or the turns of an episode."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput


class SoftOverlong(Reward):
    """DAPO's soft overlong punishment: 0 up to `max_tokens - margin`, falling to -1 at `max_tokens`, -1 beyond."""

    name: Literal["soft_overlong"] = "soft_overlong"
    """Which reward."""
    max_tokens: int = Field(16384, ge=1)
    """Length at which the full penalty is reached."""
    margin: int | None = Field(None, ge=0)
    """How many tokens before that the penalty begins; 0 makes it a step. Default: a quarter of max_tokens."""

    @field_validator("margin")
    @classmethod
    def _margin_fits(cls, margin: int | None, given: ValidationInfo) -> int | None:
        longest = given.data.get("max_tokens")
        if margin is not None and longest is not None and margin > longest:
            raise ValueError(
                f"a margin of {margin} tokens penalises even an empty response, because max_tokens is {longest}; "
                f"write a margin of at most {longest}, or leave it out"
            )
        return margin

    @property
    def begins(self) -> int:
        return self.max_tokens - (self.max_tokens // 4 if self.margin is None else self.margin)

    def score(self, item: RewardInput) -> float | None:
        length = item.length
        if length <= self.begins:
            return 0.0
        return (self.begins - length) / (self.max_tokens - self.begins) if length <= self.max_tokens else -1.0


class Repetition(Reward):
    """The share of repeated n-grams, times a penalty. An n-gram lies within one turn."""

    name: Literal["repetition"] = "repetition"
    """Which reward."""
    ngram: int = Field(3, ge=1)
    """Number of tokens in an n-gram."""
    penalty: float = Field(-1.0, le=0)
    """Value if every n-gram is a repetition."""

    def score(self, item: RewardInput) -> float | None:
        turns = [tuple(ids) for ids in (*item.earlier, item.ids)]
        all_of_them = [ids[place : place + self.ngram] for ids in turns for place in range(len(ids) - self.ngram + 1)]
        if not all_of_them:
            return 0.0
        return (1 - len(set(all_of_them)) / len(all_of_them)) * self.penalty


class Length(Reward):
    """Closeness to a target length: 1 at the target, minus 1/`scale` for each token away from it; may be negative."""

    name: Literal["length"] = "length"
    """Which reward."""
    target: int | None = Field(None, ge=0)
    """Target length in tokens. Default: the problem's gold answer, which must then be a number."""
    scale: int = Field(8192, ge=1)
    """Tokens of difference that cost one point."""
    shorter: bool = False
    """Any length up to the target counts as on target."""

    @property
    def needs_gold(self) -> bool:
        return self.target is None

    def score(self, item: RewardInput) -> float | None:
        wanted = self.target
        if wanted is None:
            gold = item.problem.gold
            if gold is None or not gold.strip().isdigit():
                return None
            wanted = int(gold)
        length = item.length
        if self.shorter:
            return 1.0 if length < wanted else 1 - (length - wanted) / self.scale
        return 1 - abs(length - wanted) / self.scale
