"""Who is computed next: prompts first, then all running sequences together. Depends on requests only, never on time.

A prompt is computed once for all samples of its request: the first is the leader, the others share its full blocks and
get a copy of the last, partly filled one. When the cache is full, the youngest sequence gives its blocks back and is
computed again later; it loses nothing, since its noise depends on positions only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lemma.engines.native.paging import BlockPool
from lemma.engines.native.sequences import Sequence
from lemma.engines.protocol import Key


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens to put into the cache: those of the leader from `leader.cached` on, for it and its followers."""

    leader: Sequence
    followers: list[Sequence] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.leader.length - self.leader.cached


class Scheduler:
    """Owns the queues. Invariant: a running sequence has all its tokens but the newest in the cache, and those that
    were launched and not yet read."""

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int,
        prefill_tokens: int,
        share_prefixes: bool = True,
        gathered_tokens: int | None = None,
    ):
        self.pool = pool
        self.max_sequences = max_sequences
        # Limits of one pass: new tokens; and these together with those in the cache that they look at, which attention
        # copies once for each sequence, shared or not. A single prompt may have more.
        self.prefill_tokens = prefill_tokens
        self.gathered_tokens = gathered_tokens
        self.share_prefixes = share_prefixes
        self.waiting: deque[Prefill] = deque()
        self.filling: list[Prefill] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._turns = 0
        # Whether prompts may still be let in beside those of the pass that was chosen last, and how many samples follow
        # those that are being computed.
        self._lets_in = False
        self._promised = 0

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.filling or self.running)

    def add(self, sequences: list[Sequence]) -> None:
        """Samples of one request, the first of which leads."""
        self.waiting.append(Prefill(sequences[0], sequences[1:]))

    def cancel(self, key: Key) -> list[Sequence]:
        """Remove every sequence of a request; those that were removed."""
        gone = [s for s in self.running if s.request.key == key]
        self.running = [s for s in self.running if s.request.key != key]
        for queue in (self.waiting, self.filling):
            for job in [job for job in queue if job.leader.request.key == key]:
                queue.remove(job)
                gone += [job.leader, *job.followers]
        for sequence in gone:
            self._drop_blocks(sequence)
        return gone

    def restart(self) -> None:
        """What the cache holds is no longer true: all that has begun goes back to the queue, in its old order."""
        begun = [*(Prefill(sequence) for sequence in self.running), *self.filling]
        for job in begun:
            self._drop_blocks(job.leader)
        self.waiting.extendleft(reversed(begun))
        self.running, self.filling = [], []
        self.pool.forget_all()

    def drop_all(self) -> None:
        """After trouble at any point: no sequence is left, and every block is free."""
        self.waiting.clear()
        self.running, self.filling = [], []
        self.pool.reset()

    # --- prompts -----------------------------------------------------------------------------------------------

    def next_prefill(self) -> list[tuple[Prefill, int]]:
        """Prompts to compute now and how many tokens of each; empty when running sequences should go on.

        Only those are let in that this pass needs, so that it can begin; `prefilled` lets in the others first of all,
        so that who is let in does not depend on the pass.
        """
        self._lets_in, self._promised = True, sum(len(job.followers) for job in self.filling)
        budget, gathered = self.prefill_tokens, 0
        chosen: list[tuple[Prefill, int]] = []
        while len(chosen) < len(self.filling) or self._let_in():
            job = self.filling[len(chosen)]
            part = min(budget, job.left)
            gathered += job.leader.cached + part
            if part == 0 or (chosen and self.gathered_tokens is not None and gathered > self.gathered_tokens):
                break
            chosen.append((job, part))
            budget -= part
        assert self.running or self.filling or not self.waiting, "a sequence that the cache cannot hold was let in"
        return chosen

    def _let_in(self) -> bool:
        """Let the next prompt in, if nothing stands in its way; after the first that must wait, all others do."""
        if not (self._lets_in and self.waiting):
            return False
        before = len(self.filling)
        followers = self._admit(self.waiting[0])
        self._lets_in = followers is not None
        self._promised += followers or 0
        return len(self.filling) > before

    def _admit(self, job: Prefill) -> int | None:
        """Give blocks to a prompt and to as many of its samples as there is room for; the rest waits its turn.

        Gives how many follow this one; None where there is no room for it, or not for all of its samples.
        """
        room = self.max_sequences - len(self.running) - len(self.filling) - self._promised
        leader, pool = job.leader, self.pool
        if room < 1:
            return None
        known = self._find(leader) if self.share_prefixes else []
        own = pool.needed(leader.length + 1) - len(known)
        spare = pool.free - pool.unowned(known) - own - self._promised
        if spare < 0:
            return None
        self.waiting.popleft()
        leader.blocks = [pool.share(block) for block in known] + [pool.take() for _ in range(own)]
        leader.cached = len(known) * pool.size
        fits = min(len(job.followers), room - 1, spare // 2)
        later = job.followers[fits:]
        self.filling.append(Prefill(leader, job.followers[:fits]))
        if later:
            self.waiting.appendleft(Prefill(later[0], later[1:]))
            return None
        return fits

    def _find(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the longest known beginning of its tokens, the last token never included."""
        self.pool.extend(sequence.digests, sequence.tokens)
        return self.pool.find(sequence.digests[: (sequence.length - 1) // self.pool.size])

    def prefilled(self, job: Prefill, tokens: int) -> list[tuple[int, int]]:
        """Note that tokens of a prompt are in the cache. When it is complete everybody starts running, and followers
        need copies of blocks: from which, to which."""
        while self._let_in():
            pass
        leader = job.leader
        leader.cached += tokens
        if job.left:
            return []
        self.filling.remove(job)
        if self.share_prefixes:
            self._remember(leader)
        full = leader.length // self.pool.size
        is_partial = leader.length % self.pool.size != 0
        copies = []
        for follower in job.followers:
            follower.blocks = [self.pool.share(block) for block in leader.blocks[:full]]
            follower.cached = leader.cached
            follower.digests = leader.digests.copy()
            if is_partial:
                follower.blocks.append(self.pool.take())
                copies.append((leader.blocks[full], follower.blocks[full]))
        for sequence in (leader, *job.followers):
            self._turns += 1
            sequence.turn = self._turns
            self.running.append(sequence)
        return copies

    # --- running sequences -------------------------------------------------------------------------------------

    def reserve(self, steps: int) -> list[Sequence]:
        """Make sure that every running sequence has blocks for `steps` more tokens; the youngest give way."""
        kept = 0
        while kept < len(self.running):
            sequence = self.running[kept]
            missing = self.pool.needed(sequence.cached + steps) - len(sequence.blocks)
            if missing <= 0:
                kept += 1
                continue
            while missing > self.pool.free and len(self.running) > kept + 1:
                self._preempt(self.running.pop())
            if missing > self.pool.free:
                self._preempt(self.running.pop())
                break
            sequence.blocks += [self.pool.take() for _ in range(missing)]
            kept += 1
        return self.running

    def reserve_ahead(self, sequences: list[Sequence], steps: int) -> bool:
        """Blocks for `steps` more tokens of each, if there are enough for all; else nobody gets any or gives way."""
        missing = [max(0, self.pool.needed(s.cached + steps) - len(s.blocks)) for s in sequences]
        if sum(missing) > self.pool.free:
            return False
        for sequence, count in zip(sequences, missing, strict=True):
            if count:
                sequence.blocks += [self.pool.take() for _ in range(count)]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._drop_blocks(sequence)
        self.waiting.appendleft(Prefill(sequence))
        self.preemptions += 1

    def finish(self, sequences: list[Sequence]) -> None:
        """These run no more. Their blocks are given back; what they hold stays findable."""
        for sequence in sequences:
            sequence.cached = min(sequence.cached, sequence.length - 1)
            if self.share_prefixes:
                self._remember(sequence)
            self._drop_blocks(sequence)
        self.running = [sequence for sequence in self.running if sequence.blocks]

    def _remember(self, sequence: Sequence) -> None:
        """Make the blocks findable that its tokens in the cache fill."""
        full = sequence.cached // self.pool.size
        if len(sequence.digests) < full:
            self.pool.extend(sequence.digests, sequence.tokens)
        self.pool.remember(sequence.digests[:full], sequence.blocks)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.cached = [], 0
