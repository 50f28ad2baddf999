"""What stands between two turns: from the end of what the policy said to where it speaks next, in ids.

History is never rendered again. The chat template writes a short conversation around marks, and what it puts behind the
first mark is the bridge. The reply inside it is encoded so that no special token in it is alive.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from lemma.formats.encode import encode_text
from lemma.formats.format import Format

SAID, HEARD = "THE\u2063POLICY\u2063SAID", "THE\u2063REPLY\u2063WAS"


@dataclass(frozen=True)
class Bridge:
    """The ids around a reply, as one format and tokenizer write them."""

    tokenizer: Any
    before: list[int]
    after: list[int]
    ends: frozenset[int]
    longest: int

    @classmethod
    def of(cls, fmt: Format, tokenizer: Any, ends: Collection[int], longest: int) -> Bridge:
        """From the chat template; around a plain line of text where the format has no turns."""
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": SAID},
            {"role": "user", "content": HEARD},
        ]
        text = fmt.written(turns, tokenizer)
        _, said, behind = text.rpartition(SAID)
        before, heard, after = behind.partition(HEARD)
        if not said or not heard:
            before, after = "\n", "\n"
        around = encode_text(before, tokenizer), encode_text(after, tokenizer)
        return cls(tokenizer, *around, frozenset(ends) | {tokenizer.eos_token_id}, longest)

    def ids(self, said: np.ndarray, reply: str) -> tuple[np.ndarray, bool]:
        """The ids that follow what was said, and whether the reply was cut.

        The token that ends a turn is part of the bridge only where the policy did not sample it.
        """
        front = self.before
        if len(said) and int(said[-1]) in self.ends and front and front[0] in self.ends:
            front = front[1:]
        middle = self._plain(reply)
        cut = len(middle) > self.longest
        if cut:
            half = self.longest // 2
            middle = [*middle[: self.longest - half], *middle[len(middle) - half :]]
        ids = [*front, *middle, *self.after]
        return np.asarray(ids, dtype=np.int32), cut

    def _plain(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are only spelled, not meant."""
        if not text:
            return []
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
