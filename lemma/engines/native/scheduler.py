"""What is computed next: prefill first, then decoding of all running sequences. Depends on requests only, not on time.
For clients who do not know each other: parts of prompts, and a burst of decoding after each.

A prompt is computed once for all samples of its request: the first is the leader, the others share its full blocks and
get a copy of the last, partly filled one. When the cache is full, the youngest sequence is preempted: it gives up its
blocks and is recomputed later, with the same tokens, since its noise depends on positions only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lemma.engines.native.paging import BlockPool
from lemma.engines.native.sequences import Sequence
from lemma.engines.protocol import Key


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens to write to the cache: those of the leader from `leader.cached` on, for it and its followers."""

    leader: Sequence
    followers: list[Sequence] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.leader.length - self.leader.cached


class Scheduler:
    """Owns the queues. Invariant: a running sequence has all its tokens in the cache, including those launched and not
    yet read, but not the newest one."""

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
        # Limits of one pass: new tokens; and new plus cached tokens, which attention gathers for each sequence, shared
        # or not. A single prompt may have more.
        self.prefill_tokens = prefill_tokens
        self.gathered_tokens = gathered_tokens
        self.share_prefixes = share_prefixes
        # Prompt tokens between two bursts, if prefill has to leave room for decoding.
        self.part_tokens: int | None = None
        self._burst_is_due = False
        self.waiting: deque[Prefill] = deque()
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._run_ids = 0
        # Whether more prompts may be admitted to the current round of prefill, and how many followers the prompts in
        # prefill have: they will need blocks and rows.
        self._is_admitting = False
        self._promised = 0

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the samples of one request; the first is the leader."""
        self.waiting.append(Prefill(sequences[0], sequences[1:]))

    def cancel(self, key: Key) -> list[Sequence]:
        """Remove every sequence of a request and return them."""
        gone = [s for s in self.running if s.request.key == key]
        self.running = [s for s in self.running if s.request.key != key]
        for queue in (self.waiting, self.prefilling):
            for job in [job for job in queue if job.leader.request.key == key]:
                queue.remove(job)
                gone += [job.leader, *job.followers]
        for sequence in gone:
            self._drop_blocks(sequence)
        return gone

    def restart(self) -> None:
        """The content of the cache is void: all sequences that have started go back to the queue, in the old order."""
        begun = [*(Prefill(sequence) for sequence in self.running), *self.prefilling]
        for job in begun:
            self._drop_blocks(job.leader)
        self.waiting.extendleft(reversed(begun))
        self.running, self.prefilling = [], []
        self.pool.forget_all()

    def drop_all(self) -> None:
        """After an error at any point: no sequence is left, and every block is free."""
        self.waiting.clear()
        self.running, self.prefilling = [], []
        self.pool.reset()

    # --- prompts -----------------------------------------------------------------------------------------------

    def next_prefill(self) -> list[tuple[Prefill, int]]:
        """Prompts to compute now, and how many tokens of each; empty if running sequences should be decoded.

        Only as many prompts are admitted as this pass needs, so that it can be launched early. `prefilled` starts by
        admitting the rest, so that the set of admitted prompts does not depend on the passes.
        """
        self._is_admitting, self._promised = True, sum(len(job.followers) for job in self.prefilling)
        if self.part_tokens is None:
            chosen = self._parts(self._in_turn(), self.prefill_tokens, self.prefill_tokens)
        elif self._burst_is_due and self.running:
            chosen = []
        else:
            chosen = self._fair_parts(self.part_tokens)
        self._burst_is_due = bool(chosen)
        assert self.running or self.prefilling or not self.waiting, "a waiting sequence can never be admitted"
        return chosen

    def _parts(self, jobs: Iterable[Prefill], budget: int, first: int) -> list[tuple[Prefill, int]]:
        """What one pass takes of each prompt; of the first one `first` tokens at most."""
        gathered = 0
        chosen: list[tuple[Prefill, int]] = []
        for job in jobs:
            part = min(budget, job.left) if chosen else min(first, job.left)
            gathered += job.leader.cached + part
            if part == 0 or (chosen and self.gathered_tokens is not None and gathered > self.gathered_tokens):
                break
            chosen.append((job, part))
            budget -= part
        return chosen

    def _in_turn(self) -> Iterator[Prefill]:
        place = 0
        while place < len(self.prefilling) or self._admit_next():
            yield self.prefilling[place]
            place += 1

    def _fair_parts(self, budget: int) -> list[tuple[Prefill, int]]:
        """Half of the tokens are for the oldest prompt, so that it does not wait forever, the rest for those that need
        fewest, so that they do not wait for long ones; what they leave is the oldest's too."""
        jobs = sorted([*self.prefilling, *self.waiting], key=lambda job: job.leader.submitted)
        jobs[1:] = sorted(jobs[1:], key=lambda job: job.left)
        chosen = self._parts(self._admitted(jobs), budget, max(1, budget // 2))
        self._is_admitting = False
        if chosen:
            oldest, _ = chosen[0]
            chosen[0] = oldest, min(oldest.left, budget - sum(part for _, part in chosen[1:]))
        return chosen

    def _admitted(self, jobs: list[Prefill]) -> Iterator[Prefill]:
        """Those in prefill, and of the others as many as there is room for."""
        for job in jobs:
            if job.leader.blocks:
                yield job
            elif self._admit_next(job):
                yield self.prefilling[-1]

    def _admit_next(self, job: Prefill | None = None) -> bool:
        """Admit this prompt, or the next if there is room for it; after the first that has to wait, all others wait."""
        if not (self._is_admitting and self.waiting):
            return False
        before = len(self.prefilling)
        followers = self._admit(job or self.waiting[0])
        self._is_admitting = followers is not None
        self._promised += followers or 0
        return len(self.prefilling) > before

    def _admit(self, job: Prefill) -> int | None:
        """Admit a prompt with as many of its samples as there is room for; the rest stay in the queue.

        Returns the number of followers admitted; None if there is no room for the prompt, or not for all its samples.
        """
        room = self.max_sequences - len(self.running) - len(self.prefilling) - self._promised
        leader, pool = job.leader, self.pool
        if room < 1:
            return None
        known: list[int] = []
        if self.share_prefixes:  # the longest cached prefix of its tokens; at least the last token is left to compute
            pool.extend(leader.digests, leader.tokens)
            known = pool.find(leader.digests[: (leader.length - 1) // pool.size])
        own = pool.needed(leader.length + 1) - len(known)
        spare = pool.free - pool.unowned(known) - own - self._promised
        if spare < 0:
            return None
        self.waiting.remove(job)
        leader.blocks = [pool.share(block) for block in known] + [pool.take() for _ in range(own)]
        leader.cached = len(known) * pool.size
        fits = min(len(job.followers), room - 1, spare // 2)
        later = job.followers[fits:]
        self.prefilling.append(Prefill(leader, job.followers[:fits]))
        if later:
            self.waiting.appendleft(Prefill(later[0], later[1:]))
            return None
        return fits

    def prefilled(self, job: Prefill, tokens: int) -> list[tuple[int, int]]:
        """Record that tokens of a prompt are in the cache. Once it is complete, leader and followers start running;
        returns the block copies that the followers need, as pairs (from, to)."""
        while self._admit_next():
            pass
        leader = job.leader
        leader.cached += tokens
        if job.left:
            return []
        self.prefilling.remove(job)
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
            self._run_ids += 1
            sequence.run_id = self._run_ids
            self.running.append(sequence)
        return copies

    # --- running sequences -------------------------------------------------------------------------------------

    def reserve(self, steps: int) -> list[Sequence]:
        """Make sure that every running sequence has blocks for `steps` more tokens; preempt the youngest if needed."""
        kept = 0
        while kept < len(self.running):
            sequence = self.running[kept]
            missing = self.pool.needed(sequence.cached + steps) - len(sequence.blocks)
            if missing <= 0:
                kept += 1
                continue
            while missing > self._unpromised and (self.prefilling or len(self.running) > kept + 1):
                self._preempt_youngest()
            if missing > self._unpromised:
                self._preempt_youngest()
                break
            sequence.blocks += [self.pool.take() for _ in range(missing)]
            kept += 1
        return self.running

    def reserve_ahead(self, sequences: list[Sequence], steps: int) -> bool:
        """Allocate blocks for `steps` more tokens of each, if there are enough for all; otherwise change nothing."""
        missing = [max(0, self.pool.needed(s.cached + steps) - len(s.blocks)) for s in sequences]
        if sum(missing) > self.pool.free:
            return False
        for sequence, count in zip(sequences, missing, strict=True):
            if count:
                sequence.blocks += [self.pool.take() for _ in range(count)]
        return True

    @property
    def _unpromised(self) -> int:
        """Free blocks that the followers of prompts in prefill will not need."""
        return self.pool.free - sum(len(job.followers) for job in self.prefilling)

    def _preempt_youngest(self) -> None:
        job = self.prefilling.pop() if self.prefilling else Prefill(self.running.pop())
        self._drop_blocks(job.leader)
        self.waiting.appendleft(job)
        self.preemptions += 1

    def finish(self, sequences: list[Sequence]) -> None:
        """Remove finished sequences and release their blocks, whose content stays findable."""
        for sequence in sequences:
            sequence.cached = min(sequence.cached, sequence.length - 1)
            if self.share_prefixes:
                self._remember(sequence)
            self._drop_blocks(sequence)
        self.running = [sequence for sequence in self.running if sequence.blocks]

    def _remember(self, sequence: Sequence) -> None:
        """Make its full blocks findable by hash."""
        full = sequence.cached // self.pool.size
        if len(sequence.digests) < full:
            self.pool.extend(sequence.digests, sequence.tokens)
        self.pool.remember(sequence.digests[:full], sequence.blocks)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.cached = [], 0
