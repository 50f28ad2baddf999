"""Samples in the making, and what they become.

Tokens come from the device for many sequences at once and stay together as they came: a sequence knows its row in each
`Read`. They are put in line once, at the end, for all sequences that end together.
Shapes: B rows, K tokens of each.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from lemma.core.random import key as random_key
from lemma.core.types import Finish
from lemma.engines.protocol import Completion, Request
from lemma.engines.stop_strings import StopWatcher

# From so many sequences on, one gather for all costs less than a view of each one's row.
MANY = 4


@dataclass(slots=True, eq=False)
class Read:
    """What was read of the device at one time: a row for each sequence."""

    ids_BK: np.ndarray
    logprobs_BK: np.ndarray
    kept_BK: np.ndarray


@dataclass(slots=True, eq=False)
class Past:
    """The newest read of some sequences, and their past before it, in which each had `start` tokens. Sequences that
    have been together in all reads share it."""

    read: Read
    before: Past | None
    start: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = 0 if self.before is None else self.before.start + self.before.read.ids_BK.shape[1]


def reads_of(past: Past | None) -> list[Read]:
    """Oldest first."""
    found = []
    while past is not None:
        found.append(past.read)
        past = past.before
    return found[::-1]


class SeenIds:
    """Ids without repetition, from a prompt and from so many `reads` of what followed. Another one costs its own
    length, however many ids there are."""

    def __init__(self, prompt: np.ndarray):
        self.ids = array("q")
        self.reads = -1
        self._known: set[int] = set()
        self.add(prompt)

    def add(self, ids: np.ndarray) -> None:
        new = set(ids.tolist()) - self._known
        self._known |= new
        self.ids.extend(new)
        self.reads += 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample in the making: `count` tokens so far, `limit` at most. Its tokens are in `past`, in these `rows`, of
    the last read perhaps not all.

    `cached` counts the tokens whose keys and values are in its blocks, or will be when what was launched is done;
    `turn` is another number each time it starts to run. It has blocks while it runs, and none once it has ended.
    `versions` has the first token of each span that one version of the weights sampled, and that version. `digests`
    are those of its first full blocks, as far as they were asked for.
    """

    request: Request
    sample: int
    seed: int
    limit: int
    end_ids: frozenset[int]
    watcher: StopWatcher | None
    versions: list[tuple[int, int]]
    submitted: float = field(default_factory=time.perf_counter)
    count: int = 0
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    turn: int = 0
    first: float = 0.0
    past: Past | None = None
    rows: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    _noise_key: int | None = None
    _seen: SeenIds | None = None

    @property
    def noise_key(self) -> int:
        """Made when it is first asked for: the device has its prompt by then."""
        if self._noise_key is None:
            self._noise_key = random_key(self.seed, *self.request.key, "sample", self.sample)
        return self._noise_key

    @property
    def tokens(self) -> np.ndarray:
        if self.past is None:
            return self.request.prompt
        return np.concatenate([self.request.prompt, *self._ids_since(0)])[: self.length]

    @property
    def length(self) -> int:
        return len(self.request.prompt) + self.count

    @property
    def last(self) -> int:
        """Its newest token; there must be one."""
        return int(self.newest[-1])

    @property
    def newest(self) -> np.ndarray:
        """The tokens of the last read."""
        assert self.past is not None
        return self.past.read.ids_BK[self.rows[-1], : self.count - self.past.start]

    @property
    def launched(self) -> int:
        """How many tokens it has while it runs, with those that were launched and not yet read."""
        return self.cached + 1 - len(self.request.prompt)

    def _ids_since(self, number: int) -> list[np.ndarray]:
        """The ids of all reads from that one on; the last ones may be too many."""
        found, past = [], self.past
        for row in reversed(self.rows[number:]):
            assert past is not None
            found.append(past.read.ids_BK[row])
            past = past.before
        return found[::-1]

    def seen_ids(self) -> np.ndarray:
        """Each id of the prompt and the completion once, in no order."""
        if self._seen is None:
            self._seen = SeenIds(self.request.prompt)
        for ids in self._ids_since(self._seen.reads):
            self._seen.add(ids)
        return np.array(self._seen.ids)

    def renew(self, version: int) -> None:
        """Later tokens come from other weights."""
        if self.versions[-1][0] == self.count:
            self.versions.pop()
        self.versions.append((self.count, version))

    def accept(self, past: Past, row: int, may_end: bool, now: float) -> Finish | None:
        """Take the tokens of a read up to the end of the sequence; why it ends, if it does. The rest was drawn in vain.

        `may_end` is False where none of the tokens is an end token of any sequence.
        """
        steps = past.read.ids_BK.shape[1]
        room = self.limit - self.count
        finish: Finish | None = None
        taken = steps
        if steps >= room:
            taken, finish = room, "length"
        if may_end or self.watcher is not None:
            until_end = self._end_within(past.read.ids_BK[row, :taken].tolist())
            if until_end is not None:
                taken, finish = until_end, "stop"
        if not self.count:
            self.first = now
        self.past = past
        self.rows.append(row)
        self.count += taken
        return finish

    def _end_within(self, tokens: list[int]) -> int | None:
        """How many of these tokens belong to a sequence that ends among them by an end token or a stop string."""
        for number, token in enumerate(tokens, start=1):
            stopped = self.watcher is not None and self.watcher.feed(token)
            if (stopped or token in self.end_ids) and self.count + number > self.request.sampling.min_tokens:
                return number
        return None


def accept_all(sequences: list[Sequence], read: Read, may_end: list[bool]) -> list[tuple[Sequence, Finish]]:
    """Give each its row; those that end with it, in the same order."""
    now = time.perf_counter()
    pasts: dict[Past | None, Past] = {}
    ended = []
    for row, (sequence, maybe) in enumerate(zip(sequences, may_end, strict=True)):
        past = pasts.get(sequence.past)
        if past is None:
            past = pasts[sequence.past] = Past(read, sequence.past)
        finish = sequence.accept(past, row, maybe, now)
        if finish is not None:
            ended.append((sequence, finish))
    return ended


def completions_of(ended: Iterable[tuple[Sequence, Finish]]) -> list[Completion]:
    """What became of sequences, in the same order."""
    now = time.perf_counter()
    groups: dict[Past | None, list[tuple[int, Sequence, Finish]]] = {}
    for place, (sequence, finish) in enumerate(ended):
        groups.setdefault(sequence.past, []).append((place, sequence, finish))
    found: dict[int, Completion] = {}
    for past, members in groups.items():
        parts = _in_line(past, [sequence.rows for _, sequence, _ in members])
        for (place, sequence, finish), ids, logprobs, kept in zip(members, *parts, strict=True):
            count, versions = sequence.count, sequence.versions
            if len(ids) > count:  # what was drawn after the end is there too
                ids, logprobs, kept = ids[:count], logprobs[:count], kept[:count]
            found[place] = Completion(
                sequence.request.key,
                sequence.sample,
                ids,
                logprobs,
                kept,
                finish,
                versions[0][1],
                now - sequence.submitted,
                sequence.first - sequence.submitted if sequence.first else 0.0,
                tuple(versions) if len(versions) > 1 else (),
            )
    return [found[place] for place in range(len(found))]


def _in_line(past: Past | None, rows: list[list[int]]) -> list[Iterable[np.ndarray]]:
    """Ids, log-probabilities and kept mass of sequences with one past, a row for each sequence."""
    if past is None:
        return [[np.zeros(0, dtype) for _ in rows] for dtype in (np.int64, np.float32, np.float32)]
    reads = reads_of(past)
    parts = [[getattr(read, name) for read in reads] for name in Read.__slots__]
    if len(rows) < MANY:
        return [[np.concatenate([x[row] for x, row in zip(part, one, strict=True)]) for one in rows] for part in parts]
    by_read = np.array(rows).T
    return [np.concatenate([x[row] for x, row in zip(part, by_read, strict=True)], axis=1) for part in parts]
