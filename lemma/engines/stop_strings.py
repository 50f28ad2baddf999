"""Stop strings across token boundaries: text is decoded only if the newest token could end one.

A stop string counts if it lies wholly within the completion and ends inside the newest token, wherever it began.
Special tokens are text like any other, so `</answer>` is found whether or not a tokenizer has a token for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lemma.engines.protocol import Completion
    from lemma.models.policy import Policy

UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are not a whole character (yet)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of these ids, special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def ends_of(policy: Policy) -> frozenset[int]:
    """Every token that ends a completion: the tokenizer's, and those in the model's generation config."""
    named = getattr(policy.causal.generation_config, "eos_token_id", None)
    several = named if isinstance(named, list) else [named]
    return frozenset(int(token) for token in (*several, policy.tokenizer.eos_token_id) if token is not None)


def text_of(completion: Completion, ends: frozenset[int], stops: Sequence[str], tokenizer: Any) -> str:
    """The text without the token that ends it, and without anything the last token adds after a stop string."""
    ids = completion.ids.tolist()
    if completion.finish == "stop" and ids and ids[-1] in ends:
        ids = ids[:-1]
    text = decode(tokenizer, ids)
    places = [(text.find(stop) + len(stop)) for stop in stops if stop in text]
    return text[: min(places)] if places and completion.finish == "stop" else text


class StopTable:
    """Which tokens could end a stop string: filled lazily, shared by all sequences with the same stop strings."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        assert all(stops), "a stop string must not be empty"
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self._last = frozenset(stop[-1] for stop in self.stops)
        # A decoder may insert spaces between tokens, so any token may add one.
        self._any = " " in self._last
        self._candidates: dict[int, bool] = {}
        # A character has at most four bytes and a token at least one; a few more for decoders that need context.
        self.window = 4 * max(map(len, self.stops), default=0) + 4

    def may_end(self, token: int) -> bool:
        may_end = self._candidates.get(token)
        if may_end is None:
            text = decode(self.tokenizer, [token])
            may_end = self._any or UNKNOWN in text or not self._last.isdisjoint(text)
            self._candidates[token] = may_end
        return may_end


class StopWatcher:
    """Follows one completion: `feed` says whether a stop string ends in the given token."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], table: StopTable | None = None):
        self._table = table or StopTable(tokenizer, stops)
        self._ids: deque[int] = deque(maxlen=self._table.window)

    def feed(self, token: int) -> bool:
        if not self._table.stops:
            return False
        self._ids.append(int(token))
        if not self._table.may_end(int(token)):
            return False
        ids = list(self._ids)
        text = decode(self._table.tokenizer, ids)
        if not any(stop in text for stop in self._table.stops):
            return False
        # The text changed by the newest token starts here: it may complete a partial character.
        before = decode(self._table.tokenizer, ids[:-1])
        known = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        return any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in self._table.stops)
