"""Samples from their request on, while they are generated, and the completions they become.

Tokens arrive from the device for many sequences at once and stay in the arrays they arrived in: a sequence knows its
row in each `Readback`. They are concatenated once, at the end, for all sequences that end together.
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
from lemma.engines.protocol import Completion, EngineError, Request
from lemma.engines.sampling import check_request, end_ids
from lemma.engines.stop_strings import StopTable, StopWatcher
from lemma.models.policy import Policy

# From this many sequences on, one gather for all is cheaper than slicing each row.
GATHER_FROM = 4
# Sets of stop strings whose tables are kept; clients of a server choose their own.
MOST_TABLES = 64


@dataclass(slots=True, eq=False)
class Readback:
    """Results read from the device at one time: a row for each sequence."""

    ids_BK: np.ndarray
    logprobs_BK: np.ndarray
    kept_BK: np.ndarray


@dataclass(slots=True, eq=False)
class History:
    """A linked list of readbacks, newest first; `start` is the number of tokens before this one. Shared by sequences
    that were in the same readbacks from the start."""

    read: Readback
    before: History | None
    start: int


class SeenIds:
    """The distinct ids of a prompt and of the first `reads` readbacks. Adding one costs time in its own length only."""

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
    """One sample while it is generated: `count` tokens so far, `limit` at most. Its tokens are in `history`, in these
    `rows`; the last readback may hold more than belong to it.

    `cached` counts the tokens whose keys and values are in its blocks, or will be once the launched steps are done.
    `run_id` is new each time it starts running. It has blocks while it runs, and none once it has ended. `versions`
    has a pair for each span sampled by one version of the weights: the index of its first token, and the version.
    `digests` are those of its first full blocks, as far as computed.
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
    run_id: int = 0
    first: float = 0.0
    history: History | None = None
    rows: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    _noise_key: int | None = None
    _seen: SeenIds | None = None

    @property
    def noise_key(self) -> int:
        """Computed on first use, when the device is already busy with the prompt."""
        if self._noise_key is None:
            self._noise_key = random_key(self.seed, *self.request.key, "sample", self.sample)
        return self._noise_key

    @property
    def tokens(self) -> np.ndarray:
        if self.history is None:
            return self.request.prompt
        return np.concatenate([self.request.prompt, *self._ids_since(0)])[: self.length]

    @property
    def length(self) -> int:
        return len(self.request.prompt) + self.count

    @property
    def newest(self) -> np.ndarray:
        """The tokens of the last readback."""
        assert self.history is not None
        return self.history.read.ids_BK[self.rows[-1], : self.count - self.history.start]

    @property
    def launched(self) -> int:
        """How many tokens a running sequence has, including those launched and not yet read."""
        return self.cached + 1 - len(self.request.prompt)

    def _ids_since(self, number: int) -> list[np.ndarray]:
        """The ids of all readbacks from that number on; the last one may hold ids beyond the end."""
        found, history = [], self.history
        for row in reversed(self.rows[number:]):
            assert history is not None
            found.append(history.read.ids_BK[row])
            history = history.before
        return found[::-1]

    def seen_ids(self) -> np.ndarray:
        """The distinct ids of the prompt and the completion, in no particular order."""
        if self._seen is None:
            self._seen = SeenIds(self.request.prompt)
        for ids in self._ids_since(self._seen.reads):
            self._seen.add(ids)
        return np.array(self._seen.ids)

    def start_span(self, version: int) -> None:
        """Later tokens come from these weights."""
        if self.versions[-1][0] == self.count:
            self.versions.pop()
        self.versions.append((self.count, version))

    def accept(self, history: History, row: int, may_end: bool, now: float) -> Finish | None:
        """Take the tokens of a readback up to the end of the sequence; the finish reason, if it ends. The rest is
        discarded.

        `may_end` is False if none of the tokens is an end token of any sequence.
        """
        steps = history.read.ids_BK.shape[1]
        room = self.limit - self.count
        finish: Finish | None = None
        taken = steps
        if steps >= room:
            taken, finish = room, "length"
        if may_end or self.watcher is not None:
            until_end = self._end_within(history.read.ids_BK[row, :taken].tolist())
            if until_end is not None:
                taken, finish = until_end, "stop"
        if not self.count:
            self.first = now
        self.history = history
        self.rows.append(row)
        self.count += taken
        return finish

    def _end_within(self, tokens: list[int]) -> int | None:
        """How many of these tokens there are up to an end token or a stop string, if there is one."""
        for number, token in enumerate(tokens, start=1):
            stopped = self.watcher is not None and self.watcher.feed(token)
            if (stopped or token in self.end_ids) and self.count + number > self.request.sampling.min_tokens:
                return number
        return None


def accept_all(sequences: list[Sequence], read: Readback, may_end: list[bool]) -> list[tuple[Sequence, Finish]]:
    """Give each sequence its row; returns those that end with it, in the same order."""
    now = time.perf_counter()
    histories: dict[History | None, History] = {}
    ended = []
    for row, (sequence, maybe) in enumerate(zip(sequences, may_end, strict=True)):
        history = histories.get(sequence.history)
        if history is None:
            before = sequence.history
            start = 0 if before is None else before.start + before.read.ids_BK.shape[1]
            history = histories[before] = History(read, before, start)
        finish = sequence.accept(history, row, maybe, now)
        if finish is not None:
            ended.append((sequence, finish))
    return ended


def completions_of(ended: Iterable[tuple[Sequence, Finish]]) -> list[Completion]:
    """The completions of ended sequences, in the same order."""
    now = time.perf_counter()
    groups: dict[History | None, list[tuple[int, Sequence, Finish]]] = {}
    for place, (sequence, finish) in enumerate(ended):
        groups.setdefault(sequence.history, []).append((place, sequence, finish))
    found: dict[int, Completion] = {}
    for history, members in groups.items():
        parts = _concatenate(history, [sequence.rows for _, sequence, _ in members])
        for (place, sequence, finish), ids, logprobs, kept in zip(members, *parts, strict=True):
            count, versions = sequence.count, sequence.versions
            if len(ids) > count:  # tokens sampled after the end
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


def _concatenate(history: History | None, rows: list[list[int]]) -> list[Iterable[np.ndarray]]:
    """Ids, log-probabilities and kept mass of sequences with the same history, one row per sequence."""
    if history is None:
        return [[np.zeros(0, dtype) for _ in rows] for dtype in (np.int64, np.float32, np.float32)]
    reads: list[Readback] = []
    while history is not None:
        reads.append(history.read)
        history = history.before
    reads.reverse()
    parts = [[getattr(read, name) for read in reads] for name in Readback.__slots__]
    if len(rows) < GATHER_FROM:
        return [[np.concatenate([x[row] for x, row in zip(part, one, strict=True)]) for one in rows] for part in parts]
    by_read = np.array(rows).T
    return [np.concatenate([x[row] for x, row in zip(part, by_read, strict=True)], axis=1) for part in parts]


class Intake:
    """Checks requests and makes sequences of them, for a cache of so many tokens. The model's limits are read by
    `refresh` when the engine starts from idle: reading them at every request would cost more than a request."""

    def __init__(self, policy: Policy, cache_tokens: int):
        self._policy, self._cache_tokens = policy, cache_tokens
        # Which tokens may end a stop string, shared by all requests with the same stop strings.
        self._tables: dict[tuple[str, ...], StopTable] = {}
        self.refresh()

    def refresh(self) -> None:
        tokenizer = self._policy.tokenizer
        self.eos = -1 if tokenizer is None else int(tokenizer.eos_token_id)
        self._context = self._policy.context
        self._vocabulary = self._policy.causal.get_input_embeddings().weight.shape[0]

    def check(self, request: Request) -> None:
        """Refuse a request that does not fit the model or the cache."""
        check_request(request, self._context)
        prompt, longest = request.prompt, request.sampling.max_tokens
        # As an unsigned number, an id below 0 is larger than any token.
        ids = prompt.view(np.uint64) if prompt.dtype == np.int64 else prompt.astype(np.uint64)
        if ids.item(ids.argmax()) >= self._vocabulary:
            wrong = int(prompt[(prompt < 0) | (prompt >= self._vocabulary)][0])
            raise EngineError(f"request {request.name} holds {wrong}, which is not a token of the model")
        if min(len(prompt) + longest, self._context) > self._cache_tokens:
            raise EngineError(
                f"the {len(prompt)} tokens of request {request.name} and max_tokens {longest} do not fit into a cache "
                f"of {self._cache_tokens} tokens",
                fix="give the engine a larger cache or lower max_tokens",
            )

    def sequences(self, request: Request, seed: int, version: int) -> list[Sequence]:
        """A new sequence for each sample."""
        sampling, now = request.sampling, time.perf_counter()
        limit = min(sampling.max_tokens, self._context - len(request.prompt))
        ends = frozenset(token for token in end_ids(sampling, self.eos) if token >= 0)
        stops, tokenizer = sampling.stop, self._policy.tokenizer
        if stops and stops not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[stops] = StopTable(tokenizer, stops)
        watchers = [StopWatcher(tokenizer, stops, self._tables[stops]) if stops else None for _ in range(request.n)]
        return [
            Sequence(request, sample, seed, limit, ends, watcher, [(0, version)], now)
            for sample, watcher in enumerate(watchers)
        ]
