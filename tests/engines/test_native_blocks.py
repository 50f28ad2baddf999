"""The block pool never leaks, never gives a block to two owners unasked, and finds what it was told, nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lemma.engines.native.paging import BlockPool

SIZE, COUNT = 4, 9
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=16).map(lambda ids: np.array(ids))


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share what is known, grow, are remembered and go; `content` is what each block really holds."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(COUNT, SIZE)
        self.owned: dict[int, list[int]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.ids: dict[int, np.ndarray] = {}
        self.next = 0

    @rule(target=sequences, ids=TOKENS)
    def begin(self, ids: np.ndarray) -> int:
        """As the scheduler admits a prompt."""
        known = self.pool.find(self.pool.extend([], ids[:-1]))
        own = self.pool.needed(len(ids)) - len(known)
        self.next += 1
        if self.pool.free - self.pool.unowned(known) < own:
            return self.next
        blocks = [self.pool.share(block) for block in known] + [self.pool.take() for _ in range(own)]
        assert len(set(blocks)) == len(blocks) and 0 not in blocks
        taken = {block for others in self.owned.values() for block in others}
        assert taken.isdisjoint(blocks[len(known) :]), "a block of one's own belongs to nobody else"
        for place, block in enumerate(blocks):
            whole = tuple(ids[: (place + 1) * SIZE].tolist())
            if place < len(known):
                assert self.content[block] == whole, "what was found is what was asked for"
            self.content[block] = whole
        assert len(known) * SIZE < len(ids), "at least one token is left to compute"
        self.owned[self.next], self.ids[self.next] = blocks, ids
        return self.next

    @rule(name=sequences)
    def remember(self, name: int) -> None:
        if name in self.owned:
            digests = self.pool.extend([], self.ids[name])
            self.pool.remember(digests, self.owned[name])
            found = self.pool.find(digests)
            assert len(found) == len(self.ids[name]) // SIZE

    @rule(name=sequences)
    def share_all(self, name: int) -> None:
        """As the samples of a group do."""
        if name in self.owned:
            self.next += 1
            full = len(self.ids[name]) // SIZE
            self.owned[self.next] = [self.pool.share(block) for block in self.owned[name][:full]]
            self.ids[self.next] = self.ids[name][: full * SIZE]

    @rule(name=consumes(sequences))
    def end(self, name: int) -> None:
        self.pool.release(self.owned.pop(name, []))

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        assert self.pool.find(self.pool.extend([], np.array([0] * 16))) == []

    @invariant()
    def every_block_is_free_or_owned(self) -> None:
        counts = np.zeros(COUNT + 1, dtype=int)
        for blocks in self.owned.values():
            np.add.at(counts, blocks, 1)
        assert counts.tolist() == self.pool._owners
        assert self.pool.free == int((counts[1:] == 0).sum())
        assert self.pool.free + len({b for blocks in self.owned.values() for b in blocks}) == COUNT
        assert {block: digest for digest, block in self.pool._blocks.items()} == self.pool._hash_of


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestPool = PoolMachine.TestCase


def test_the_end_of_what_is_free_is_forgotten_first() -> None:
    """Beginnings are what others share."""
    pool = BlockPool(4, SIZE)
    ids = np.arange(16)
    blocks = [pool.take() for _ in range(4)]
    digests = pool.extend([], ids)
    pool.remember(digests, blocks)
    pool.release(blocks)
    pool.take()
    assert pool.find(digests) == blocks[:3]


def test_digests_may_be_asked_for_bit_by_bit() -> None:
    pool, ids = BlockPool(4, SIZE), np.arange(19)
    whole = pool.extend([], ids)
    assert len(whole) == 4 and whole[1] != pool.extend([], ids[SIZE:])[0], "a digest is of all that came before too"
    some: list[bytes] = []
    for end in (3, 4, 9, 16, 19):
        assert pool.extend(some, ids[:end]) == whole[: end // SIZE]
