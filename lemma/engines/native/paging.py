"""The paged cache's bookkeeping: which block belongs to whom, and which ids a full block holds.

A block holds the keys and values of `size` consecutive tokens. A full block is addressed by the hash of its ids and of
all ids before it, so that equal beginnings share blocks; a block whose last owner has gone stays findable until its
space is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


class BlockPool:
    """Blocks 1 to `count`; block 0 is nobody's. Invariant: a block is free, or owned by at least one sequence. Free
    blocks may still be found by hash."""

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
        """How many of these are free now, and would not be if they were shared."""
        return sum(1 for block in blocks if self._owners[block] == 0)

    def take(self) -> int:
        """A block for one owner; the one that has been free longest is forgotten for it. `free` must be above 0."""
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
        """Give blocks back, the last one first: it is the first to be forgotten, and beginnings stay findable."""
        for block in reversed(blocks):
            assert self._owners[block] > 0, "a block was given back that nobody owns"
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free[block] = None

    def remember(self, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Make blocks findable by the digests of what they hold."""
        for block, digest in zip(blocks, digests, strict=False):
            if digest not in self._blocks and block not in self._hash_of:
                self._blocks[digest], self._hash_of[block] = block, digest

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known beginning."""
        result = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            result.append(block)
        return result

    def forget_all(self) -> None:
        """The weights changed: what the blocks hold is no longer true for anybody new."""
        self._blocks.clear()
        self._hash_of.clear()

    def extend(self, digests: list[bytes], ids: np.ndarray) -> list[bytes]:
        """Add the digests of those full blocks of these ids that follow the ones whose digests are there."""
        before = digests[-1] if digests else b""
        for start in range(len(digests) * self.size, len(ids) - self.size + 1, self.size):
            part = np.ascontiguousarray(ids[start : start + self.size], dtype=np.int64).tobytes()
            before = blake2b(before + part, digest_size=16).digest()
            digests.append(before)
        return digests
