"""Guess a number: each guess is answered by higher, lower or right. Small enough to learn on a CPU in minutes."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from lemma.core.types import Message, Outcome, Problem
from lemma.data.guessing import WORDS, reply_to
from lemma.environments.environment import Action, Environment, EnvironmentOptions, Observation

NUMBER = re.compile(r"\d+")


class Guessing(Environment):
    """The secret is the problem's gold."""

    def __init__(self, words: tuple[str, str, str], mute: bool):
        self.words, self.mute, self.secret, self.found = words, mute, 0, False

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        assert problem.gold is not None, "a guessing game has a secret"
        self.secret, self.found = int(problem.gold), False
        return []

    def step(self, said: Action) -> Observation:
        numbers = NUMBER.findall(said.text)
        guess = int(numbers[-1]) if numbers else None
        self.found = guess == self.secret
        if guess is None:
            return Observation("no number")
        return Observation(reply_to(guess, self.secret, self.words, self.mute), done=self.found)

    def score(self) -> Outcome:
        return Outcome(float(self.found), self.found)


class HigherLower(EnvironmentOptions):
    """Guess the problem's gold, a whole number, from replies that say higher or lower."""

    name: Literal["higher_lower"] = "higher_lower"
    """A guessing game."""
    turns: int = Field(5, ge=1)
    """Maximum number of guesses."""
    reply_tokens: int = Field(16, ge=1)
    """Maximum number of tokens in a reply."""
    words: tuple[str, str, str] = WORDS
    """The words of the replies for higher, lower and right; choose words in the model's vocabulary."""
    mute: bool = False
    """Give the same reply to every wrong guess, so that no player can do better than chance."""

    def make(self) -> Environment:
        return Guessing(self.words, self.mute)
