"""Who is computed next: prompts first, then all running sequences together. Depends on requests only, never on time.

A prompt is computed once for all samples of its request: the first is the leader, the others share its full blocks and
get a copy of the last, partly filled one. When the cache is full, the youngest sequence gives its blocks back and is
computed again later; it loses nothing, since its noise depends on positions only.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from lemma.core.types import Finish
from lemma.engines.native.paging import BlockPool
from lemma.engines.protocol import Completion, Key, Request
from lemma.engines.stop_strings import StopTable, StopWatcher


class SeenIds:
    """Ids without repetition, from a prompt and from so many `chunks` of what followed. Another chunk costs its own
    length, however many ids there are."""

    def __init__(self, prompt: np.ndarray):
        self.ids = array("q")
        self.chunks = -1
        self._known: set[int] = set()
        self.add(prompt)

    def add(self, ids: np.ndarray) -> None:
        new = set(ids.tolist()) - self._known
        self._known |= new
        self.ids.extend(new)
        self.chunks += 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample in the making: `count` tokens so far, in `chunks` of ids, log-probabilities and kept mass.

    `cached` counts the tokens whose keys and values are in its blocks, or will be when what was launched is done;
    `turn` is another number each time it starts to run. It has blocks while it runs, and none once it has ended.
    `versions` has the first token of each span that one version of the weights sampled, and that version.
    """

    request: Request
    sample: int
    noise_key: int
    end_ids: frozenset[int]
    watcher: StopWatcher
    versions: list[tuple[int, int]]
    count: int = 0
    last: int = -1
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    turn: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    chunks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    _seen: SeenIds | None = None

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.request.prompt, *(chunk[0] for chunk in self.chunks)])

    @property
    def length(self) -> int:
        return len(self.request.prompt) + self.count

    def seen_ids(self) -> np.ndarray:
        """Each id of the prompt and the completion once, in no order."""
        if self._seen is None:
            self._seen = SeenIds(self.request.prompt)
        for chunk in self.chunks[self._seen.chunks :]:
            self._seen.add(chunk[0])
        return np.array(self._seen.ids)

    def renew(self, version: int) -> None:
        """Later tokens come from other weights."""
        if self.versions[-1][0] == self.count:
            self.versions.pop()
        self.versions.append((self.count, version))

    def room(self, context: int) -> int:
        """How many more tokens it can get."""
        return min(self.request.sampling.max_tokens - self.count, context - self.length)

    def accept(
        self, tokens: np.ndarray, logprobs: np.ndarray, kept: np.ndarray, context: int, may_end: bool
    ) -> Finish | None:
        """Take sampled tokens up to the end of the sequence; why it ends, if it does. The rest was drawn in vain.

        `may_end` is False where none of the tokens is an end token of any sequence.
        """
        sampling = self.request.sampling
        if not self.count:
            self.first = time.perf_counter()
        room = self.room(context)
        finish: Finish | None = "length" if len(tokens) >= room else None
        if may_end or sampling.stop:
            taken = self._end_within(tokens[:room].tolist())
            if taken is not None:
                room, finish = taken, "stop"
        self.chunks.append((tokens[:room], logprobs[:room], kept[:room]))
        self.count += min(room, len(tokens))
        self.last = int(self.chunks[-1][0][-1])
        return finish

    def _end_within(self, tokens: list[int]) -> int | None:
        """How many of these tokens belong to a sequence that ends among them by an end token or a stop string."""
        watches = bool(self.request.sampling.stop)
        for number, token in enumerate(tokens, start=1):
            stopped = watches and self.watcher.feed(token)
            if (stopped or token in self.end_ids) and self.count + number > self.request.sampling.min_tokens:
                return number
        return None

    def completion(self, finish: Finish) -> Completion:
        ids, logprobs, kept = (
            np.concatenate([np.zeros(0, dtype), *(chunk[part] for chunk in self.chunks)])
            for part, dtype in enumerate((np.int64, np.float32, np.float32))
        )
        return Completion(
            key=self.request.key,
            sample=self.sample,
            ids=ids,
            logprobs=logprobs,
            kept=kept,
            finish=finish,
            policy_version=self.versions[0][1],
            seconds=time.perf_counter() - self.submitted,
            first_seconds=self.first - self.submitted if self.first else 0.0,
            spans=tuple(self.versions) if len(self.versions) > 1 else (),
        )


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
        """Prompts to compute now and how many tokens of each; empty when running sequences should go on."""
        promised = sum(len(job.followers) for job in self.filling)
        while self.waiting and (more := self._admit(self.waiting[0], promised)) is not None:
            promised += more
        assert self.running or self.filling or not self.waiting, "a sequence that the cache cannot hold was let in"
        budget, gathered = self.prefill_tokens, 0
        chosen: list[tuple[Prefill, int]] = []
        for job in self.filling:
            part = min(budget, job.left)
            gathered += job.leader.cached + part
            if part == 0 or (chosen and self.gathered_tokens is not None and gathered > self.gathered_tokens):
                break
            chosen.append((job, part))
            budget -= part
        return chosen

    def _admit(self, job: Prefill, promised: int) -> int | None:
        """Give blocks to a prompt and to as many of its samples as there is room for; the rest waits its turn.

        `promised` are the samples that follow prompts which are being computed. Gives how many follow this one; None
        where there is no room for it, or not for all of its samples.
        """
        room = self.max_sequences - len(self.running) - len(self.filling) - promised
        leader = job.leader
        if room < 1:
            return None
        known = self.pool.find(leader.tokens) if self.share_prefixes else []
        own = self.pool.needed(leader.length + 1) - len(known)
        spare = self.pool.free - self.pool.unowned(known) - own - promised
        if spare < 0:
            return None
        self.waiting.popleft()
        leader.blocks = [self.pool.share(block) for block in known] + [self.pool.take() for _ in range(own)]
        leader.cached = len(known) * self.pool.size
        fits = min(len(job.followers), room - 1, spare // 2)
        later = job.followers[fits:]
        self.filling.append(Prefill(leader, job.followers[:fits]))
        if later:
            self.waiting.appendleft(Prefill(later[0], later[1:]))
            return None
        return fits

    def prefilled(self, job: Prefill, tokens: int) -> list[tuple[Sequence, int, int]]:
        """Note that tokens of a prompt are in the cache. When it is complete: block copies to make, as
        (follower, from block, to block), and everybody starts running."""
        leader = job.leader
        leader.cached += tokens
        if job.left:
            return []
        self.filling.remove(job)
        if self.share_prefixes:
            self.pool.remember(leader.tokens, leader.blocks)
        full = leader.length // self.pool.size
        copies = []
        for follower in job.followers:
            follower.blocks = [self.pool.share(block) for block in leader.blocks[:full]]
            follower.cached = leader.cached
            if leader.length % self.pool.size:
                follower.blocks.append(self.pool.take())
                copies.append((follower, leader.blocks[full], follower.blocks[full]))
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
            sequence.blocks += [self.pool.take() for _ in range(count)]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._drop_blocks(sequence)
        self.waiting.appendleft(Prefill(sequence))
        self.preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        """Give the blocks of a sequence back; what they hold stays findable."""
        if self.share_prefixes:
            self.pool.remember(sequence.tokens[: sequence.cached], sequence.blocks)
        self._drop_blocks(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.cached = [], 0


def watcher(request: Request, tokenizer: object, tables: dict[tuple[str, ...], StopTable]) -> StopWatcher:
    """A watcher for the stop strings of a request; what is learnt about tokens is shared."""
    stops = request.sampling.stop
    if stops not in tables:
        tables[stops] = StopTable(tokenizer, stops)
    return StopWatcher(tokenizer, stops, tables[stops])
