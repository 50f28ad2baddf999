"""The built-in higher_lower games: a player who knows how to reply, but not what to guess.

Game number i depends only on the seed and i. Guesses are drawn regardless of the replies, so imitating them teaches the
format and leaves a player at chance level.
"""

from __future__ import annotations

from collections.abc import Iterator

from lemma.core.random import stream
from lemma.data.data_options import GuessingOptions
from lemma.data.rows import Row

HIGHER_LOWER = "higher_lower"
WORDS = ("higher", "lower", "right")


def reply_to(guess: int, secret: int, words: tuple[str, str, str] = WORDS, mute: bool = False) -> str:
    """The reply to a guess; a mute game has one reply for all wrong ones."""
    higher, lower, right = words
    if guess == secret:
        return right
    return higher if guess < secret and not mute else lower


def game_rows(options: GuessingOptions, split: str = "train") -> Iterator[Row]:
    """A conversation and the secret of each game."""
    for number in range(options.count):
        secret = 1 + number % options.numbers
        guesses = stream(options.seed, HIGHER_LOWER, split, number).integers(1, options.numbers + 1, options.turns)
        messages = [{"role": "user", "content": options.question}]
        for turn, guess in enumerate(guesses.tolist(), start=1):
            messages.append({"role": "assistant", "content": str(guess)})
            if guess == secret or turn == options.turns:
                break
            messages.append({"role": "user", "content": reply_to(guess, secret, mute=options.mute)})
        yield Row({"messages": messages, "answer": str(secret)}, HIGHER_LOWER, number + 1)
