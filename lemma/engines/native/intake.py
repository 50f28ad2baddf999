"""From requests to sequences: what could never be finished is refused before anything is at work."""

from __future__ import annotations

import time

import numpy as np

from lemma.engines.native.sequences import Sequence
from lemma.engines.protocol import EngineError, Request, Sampling, check_request
from lemma.engines.sampling import end_ids
from lemma.engines.stop_strings import StopTable, StopWatcher
from lemma.models.policy import Policy

# So many settings are remembered with what follows from them.
MOST_SETTINGS = 1024


class Intake:
    """What all requests are measured by is looked at when work begins, since that costs more than a request does."""

    def __init__(self, policy: Policy):
        self._policy = policy
        # What is learnt about tokens that may end a stop string, shared by all requests with the same stop strings.
        self._tables: dict[tuple[str, ...], StopTable] = {}
        self._ends: dict[Sampling, frozenset[int]] = {}
        self.refresh()

    def refresh(self) -> None:
        tokenizer = self._policy.tokenizer
        self.eos = -1 if tokenizer is None else int(tokenizer.eos_token_id)
        self._context = self._policy.context
        self._vocabulary = self._policy.causal.get_input_embeddings().weight.shape[0]
        self._ends.clear()

    def check(self, request: Request, room: int) -> None:
        """Refuse what does not fit the model, or a cache with room for so many tokens."""
        check_request(request, self._context)
        prompt, longest = request.prompt, request.sampling.max_tokens
        # Read without its sign, an id below 0 is larger than any token.
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
        """One for each sample, at its beginning."""
        sampling, now = request.sampling, time.perf_counter()
        limit, ends = min(sampling.max_tokens, self._context - len(request.prompt)), self._ends_of(sampling)
        watch = self._watcher if sampling.stop else None
        return [
            Sequence(request, sample, seed, limit, ends, watch and watch(sampling.stop), [(0, version)], now)
            for sample in range(request.n)
        ]

    def _ends_of(self, sampling: Sampling) -> frozenset[int]:
        ends = self._ends.get(sampling)
        if ends is None:
            if len(self._ends) >= MOST_SETTINGS:
                self._ends.clear()
            ends = self._ends[sampling] = frozenset(token for token in end_ids(sampling, self.eos) if token >= 0)
        return ends

    def _watcher(self, stops: tuple[str, ...]) -> StopWatcher:
        if stops not in self._tables:
            self._tables[stops] = StopTable(self._policy.tokenizer, stops)
        return StopWatcher(self._policy.tokenizer, stops, self._tables[stops])
