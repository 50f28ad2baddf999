"""The slow reference: the policy's own modules, step by step, with transformers' cache and masks.

Sequences run in a batch, padded on the left. The noise of a sample is one uniform number per position from its own
stream, so a sample does not depend on the rest of the batch. Logits are the model's own, with its capping or scaling:
this engine runs every causal language model that transformers can load.

Shapes: B sequences, L padded length, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lemma.core.random import stream
from lemma.core.types import Finish
from lemma.engines.protocol import Completion, Engine, EngineError, Key, NewTokens, Request, Sampling
from lemma.engines.sampling import check_request, cut, end_ids, logprobs, penalise
from lemma.engines.stop_strings import StopTable, StopWatcher
from lemma.models.policy import Policy


@dataclass(slots=True, eq=False)
class _Row:
    """One sample while it is generated. `noise` is at the position after its last id."""

    request: Request
    sample: int
    version: int
    noise: np.random.Generator
    stops: StopWatcher
    ends: tuple[int, ...]
    submitted: float
    first_seconds: float = 0.0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def forbidden(self) -> tuple[int, ...]:
        return self.ends if len(self.ids) < self.request.sampling.min_tokens else ()

    def take(self, token: int, logprob: float, kept: float, context: int) -> None:
        """Append a token, and record whether it is the last."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.kept.append(kept)
        self.first_seconds = self.first_seconds or time.monotonic() - self.submitted
        stopped = self.stops.feed(token)
        sampling = self.request.sampling
        if (stopped or token in self.ends) and len(self.ids) > sampling.min_tokens:
            self.finish = "stop"
        elif len(self.ids) >= sampling.max_tokens or len(self.request.prompt) + len(self.ids) >= context:
            self.finish = "length"

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            self.request.key,
            self.sample,
            np.array(self.ids, dtype=np.int64),
            np.array(self.logprobs, dtype=np.float32),
            np.array(self.kept, dtype=np.float32),
            self.finish,
            self.version,
            time.monotonic() - self.submitted,
            self.first_seconds,
        )


class TransformersEngine(Engine):
    """`batch` sequences run together; the next ones start when all of them have ended.

    `in_place_of` names the engine that was asked for and cannot run this model.
    """

    name = "transformers"
    streams_tokens = True

    def __init__(self, policy: Policy, seed: int, *, batch: int = 64, in_place_of: str | None = None):
        self._policy, self._seed = policy, seed
        self.in_place_of = in_place_of
        self._batch = batch if policy.is_independent else 1
        self._version = 0
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self.finished: deque[Completion] = deque()
        self.new_tokens: deque[NewTokens] = deque()
        self._cache: Any = None
        self._mask_BL = torch.empty(0)
        self.context = policy.context

    def submit(self, request: Request) -> None:
        check_request(request, self._policy.context)
        sampling, tokenizer = request.sampling, self._policy.tokenizer
        table = StopTable(tokenizer, sampling.stop)
        for sample in range(request.n):
            self._waiting.append(
                _Row(
                    request,
                    sample,
                    self._version,
                    stream(self._seed, "transformers", *request.key, sample),
                    StopWatcher(tokenizer, (), table),
                    end_ids(sampling, tokenizer.eos_token_id),
                    time.monotonic(),
                )
            )

    def cancel(self, key: Key) -> None:
        for row in (*self._waiting, *self._running):
            if row.request.key == key and row.finish is None:
                row.finish = "cancelled"
        self._finish(self._waiting)
        self._waiting = deque(row for row in self._waiting if not row.finish)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def update_weights(self, version: int) -> None:
        self._version = version
        self.invalidate()

    def invalidate(self) -> None:
        """Unfinished sequences go back to the queue with their tokens; their cache is recomputed."""
        self._waiting.extendleft(row for row in reversed(self._running) if row.finish is None)
        self._finish(self._running)
        self._running, self._cache = [], None

    def close(self) -> None:
        self._waiting.clear()
        self.finished.clear()
        self._running, self._cache = [], None

    @torch.no_grad()
    def work(self) -> None:
        """One token for every running sequence."""
        self._retire()
        if not self._running and not self._waiting:
            return
        with _in_eval_mode(self._policy.module):
            logits_BV = self._next_logits() if self._running else self._first_logits()
        is_bad = (logits_BV.isnan().any(-1) | logits_BV.amax(-1).isinf()).tolist()
        for members in self._alike(is_bad):
            self._draw(logits_BV, members)
        broken = [row for row, bad in zip(self._running, is_bad, strict=True) if bad]
        self._retire(broken)
        if broken:
            key = "/".join(map(str, broken[0].request.key))
            raise EngineError(
                f"the model's logits are not finite for request {key}, which is dropped",
                fix="look at the weights: a learning rate that is too high makes them NaN",
            )

    def _first_logits(self) -> torch.Tensor:
        """Prefill the next sequences."""
        count = min(self._batch, len(self._waiting))
        self._running = [self._waiting.popleft() for _ in range(count)]
        texts = [np.concatenate([row.request.prompt, np.array(row.ids, dtype=np.int64)]) for row in self._running]
        width = max(map(len, texts))
        ids = np.zeros((count, width), dtype=np.int64)
        mask = np.zeros((count, width), dtype=np.int64)
        for b, text in enumerate(texts):
            ids[b, width - len(text) :] = text
            mask[b, width - len(text) :] = 1
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._policy.causal.config)
        self._mask_BL = torch.from_numpy(mask).to(self._policy.device)
        return self._forward(torch.from_numpy(ids).to(self._policy.device))

    def _next_logits(self) -> torch.Tensor:
        last = torch.tensor([[row.ids[-1]] for row in self._running], device=self._policy.device)
        self._mask_BL = torch.cat([self._mask_BL, torch.ones_like(last)], dim=1)
        return self._forward(last)

    def _forward(self, ids_BL: torch.Tensor) -> torch.Tensor:
        positions_BL = (self._mask_BL.cumsum(-1) - 1).clamp(min=0)[:, -ids_BL.shape[1] :]
        output = self._policy.causal(
            input_ids=ids_BL,
            attention_mask=self._mask_BL,
            position_ids=positions_BL,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _alike(self, is_bad: list[bool]) -> list[list[int]]:
        """Rows grouped by how they are sampled, so that their cuts are computed together."""
        groups: dict[tuple[Sampling, tuple[int, ...]], list[int]] = {}
        for b, row in enumerate(self._running):
            if not is_bad[b]:
                groups.setdefault((row.request.sampling, row.forbidden), []).append(b)
        return list(groups.values())

    def _draw(self, logits_BV: torch.Tensor, members: list[int]) -> None:
        rows = [self._running[b] for b in members]
        sampling = rows[0].request.sampling
        part = logits_BV[members]
        if sampling.repetition_penalty != 1.0:
            part = torch.stack([self._penalised(logits, row) for logits, row in zip(part, rows, strict=True)])
        masked, kept = cut(part, sampling, rows[0].forbidden)
        if sampling.temperature == 0:
            tokens = masked.argmax(-1)
        else:
            uniform = torch.tensor([[row.noise.random()] for row in rows], dtype=torch.float64, device=masked.device)
            tokens = inverse_cdf(masked, uniform)
        chosen = logprobs(part, tokens, sampling.temperature)
        for row, token, logprob, mass in zip(rows, tokens.tolist(), chosen.tolist(), kept.tolist(), strict=True):
            row.take(token, logprob, mass, self._policy.context)
            self.sampled_tokens += 1
            if row.request.stream:
                self.new_tokens.append(NewTokens(row.request.key, row.sample, np.array([token])))

    def _penalised(self, logits_V: torch.Tensor, row: _Row) -> torch.Tensor:
        seen = torch.from_numpy(np.unique(np.concatenate([row.request.prompt, np.array(row.ids, dtype=np.int64)])))
        return penalise(logits_V, seen.to(logits_V.device), row.request.sampling.repetition_penalty)

    def _finish(self, rows: Iterable[_Row]) -> None:
        self.finished.extend(row.completion() for row in rows if row.finish)

    def _retire(self, broken: list[_Row] | None = None) -> None:
        """Remove finished and broken rows from the running batch, its cache and its mask."""
        self._finish(self._running)
        keep = [b for b, row in enumerate(self._running) if not row.finish and row not in (broken or ())]
        if len(keep) == len(self._running):
            return
        self._running = [self._running[b] for b in keep]
        if not keep:
            self._cache = None
            return
        index = torch.tensor(keep, device=self._mask_BL.device)
        self._mask_BL = self._mask_BL[index]
        self._cache.batch_select_indices(index)


def inverse_cdf(masked_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """The token (B,) at which the cumulative probability first exceeds a uniform number."""
    mass_BV = masked_BV.double().softmax(-1).cumsum(-1)
    places = torch.searchsorted(mass_BV, uniform_B1 * mass_BV[:, -1:], right=True)[:, 0]
    return places.clamp(max=masked_BV.shape[-1] - 1)


@contextmanager
def _in_eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Eval mode inside `with`; restored afterwards."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
