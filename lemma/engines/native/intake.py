"""From requests to sequences: a request that could never finish is refused at submission."""

from __future__ import annotations

import time

import numpy as np

from lemma.engines.native.sequences import Sequence
from lemma.engines.protocol import EngineError, Request, check_request
from lemma.engines.sampling import end_ids
from lemma.engines.stop_strings import StopTable, StopWatcher
from lemma.models.policy import Policy

# Sets of stop strings whose tables are kept; clients of a server choose their own.
MOST_TABLES = 64


class Intake:
    """Checks requests and makes sequences of them. The model's limits are read by `refresh` when the engine starts from
    idle, not at every request, since reading them costs more than a request."""

    def __init__(self, policy: Policy):
        self._policy = policy
        # Which tokens may end a stop string, shared by all requests with the same stop strings.
        self._tables: dict[tuple[str, ...], StopTable] = {}
        self.refresh()

    def refresh(self) -> None:
        tokenizer = self._policy.tokenizer
        self.eos = -1 if tokenizer is None else int(tokenizer.eos_token_id)
        self._context = self._policy.context
        self._vocabulary = self._policy.causal.get_input_embeddings().weight.shape[0]

    def check(self, request: Request, room: int) -> None:
        """Refuse a request that does not fit the model, or a cache of `room` tokens."""
        check_request(request, self._context)
        prompt, longest = request.prompt, request.sampling.max_tokens
        # As an unsigned number, an id below 0 is larger than any token.
        ids = prompt.view(np.uint64) if prompt.dtype == np.int64 else prompt.astype(np.uint64)
        if ids.item(ids.argmax()) >= self._vocabulary:
            wrong = int(prompt[(prompt < 0) | (prompt >= self._vocabulary)][0])
            raise EngineError(f"request {request.name} holds {wrong}, which is not a token of the model")
        if min(len(prompt) + longest, self._context) > room:
            raise EngineError(
                f"the {len(prompt)} tokens of request {request.name} and max_tokens {longest} do not fit into a cache "
                f"of {room} tokens",
                fix="give the engine a larger cache or lower max_tokens",
            )

    def sequences(self, request: Request, seed: int, version: int) -> list[Sequence]:
        """A new sequence for each sample."""
        sampling, now = request.sampling, time.perf_counter()
        limit = min(sampling.max_tokens, self._context - len(request.prompt))
        ends = frozenset(token for token in end_ids(sampling, self.eos) if token >= 0)
        watch = self._watcher if sampling.stop else None
        return [
            Sequence(request, sample, seed, limit, ends, watch and watch(sampling.stop), [(0, version)], now)
            for sample in range(request.n)
        ]

    def _watcher(self, stops: tuple[str, ...]) -> StopWatcher:
        if stops not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[stops] = StopTable(self._policy.tokenizer, stops)
        return StopWatcher(self._policy.tokenizer, stops, self._tables[stops])
