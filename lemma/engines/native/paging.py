"""Bookkeeping of the paged KV cache: which sequences own a block, and which ids a full block holds.

A block holds the keys and values of `size` consecutive tokens. A full block is addressed by the hash of its ids and of
all ids before it, so that equal prefixes share blocks; a block without owners stays findable until its space is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


class BlockPool:
    """Blocks 1 to `count`; block 0 belongs to no sequence. Invariant: a block is free, or owned by at least one
    sequence. Free blocks may still be found by hash."""

    def __init__(self, count: int, size: int):
        self.count = count
        self.size = size
        self.reset()

    def reset(self) -> None:
        """Every block is free and holds nothing."""
        self._owners = [0] * (self.count + 1)
        self._hash_of: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, self.count + 1))

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def unowned(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free now and would be taken if they were shared."""
        return sum(1 for block in blocks if self._owners[block] == 0)

    def take(self) -> int:
        """A block for one owner: the least recently freed, whose content is evicted. `free` must be above 0."""
        block, _ = self._free.popitem(last=False)
        if block in self._hash_of:
            del self._blocks[self._hash_of.pop(block)]
        self._owners[block] = 1
        return block

    def share(self, block: int) -> int:
        if self._owners[block] == 0:
            del self._free[block]
        self._owners[block] += 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up ownership of blocks, the last one first, so that it is evicted first and prefixes stay findable."""
        for block in reversed(blocks):
            assert self._owners[block] > 0, "a block was released that nobody owns"
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free[block] = None

    def remember(self, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Make blocks findable by the digests of what they hold."""
        for block, digest in zip(blocks, digests, strict=False):
            if digest not in self._blocks and block not in self._hash_of:
                self._blocks[digest], self._hash_of[block] = block, digest

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix."""
        result = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            result.append(block)
        return result

    def forget_all(self) -> None:
        """The weights changed: no new sequence may reuse what the blocks hold."""
        self._blocks.clear()
        self._hash_of.clear()

    def extend(self, digests: list[bytes], ids: np.ndarray) -> list[bytes]:
        """Append the digests of the full blocks of `ids` that `digests` does not cover yet."""
        before = digests[-1] if digests else b""
        for start in range(len(digests) * self.size, len(ids) - self.size + 1, self.size):
            part = np.ascontiguousarray(ids[start : start + self.size], dtype=np.int64).tobytes()
            before = blake2b(before + part, digest_size=16).digest()
            digests.append(before)
        return digests
