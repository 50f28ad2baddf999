"""The native engine: continuous batching on the very modules that train. Nothing to copy, nothing to synchronise."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from lemma.core.random import key as random_key
from lemma.engines.base import Completion, EngineError, Key, Request, check_request
from lemma.engines.native.attention import Cache
from lemma.engines.native.blocks import BlockPool
from lemma.engines.native.runner import BURST, LADDER, Runner
from lemma.engines.native.sampler import is_plain
from lemma.engines.native.scheduler import Prefill, Scheduler, Sequence, watcher
from lemma.engines.sampling import end_ids
from lemma.engines.text import StopTable
from lemma.models.policy import Policy

BLOCK = 64
CPU_BLOCK = 16
# Share of the free GPU memory that the cache takes where no size is given.
CACHE_SHARE = 0.5
CPU_CACHE_TOKENS = 65536


class NativeEngine:
    """See `lemma.engines.base.Engine`. One thread at a time uses it."""

    name = "native"

    def __init__(
        self,
        policy: Policy,
        seed: int = 0,
        *,
        cache_tokens: int | None = None,
        max_sequences: int | None = None,
        prefill_tokens: int = 16384,
        share_prefixes: bool = True,
        use_graphs: bool | None = None,
        burst: int = BURST,
    ):
        self.policy = policy
        self.seed = seed
        self.version = 0
        on_gpu = policy.device.type == "cuda"
        self._fused = on_gpu
        self._burst = min(burst, BURST)
        self._block = BLOCK if on_gpu else CPU_BLOCK
        rows = min(max_sequences or LADDER[-1], LADDER[-1])
        self.cache_tokens = cache_tokens or self._default_tokens(rows)
        self.cache = self._make_cache()
        self.pool = BlockPool(self.cache.shape[1] // self._block - 1, self._block)
        self.scheduler = Scheduler(self.pool, rows, prefill_tokens, share_prefixes)
        graphs = on_gpu if use_graphs is None else use_graphs
        self.runner = Runner(policy, self.cache, rows, policy.context, graphs, self._fused)
        self._tables: dict[tuple[str, ...], StopTable] = {}
        self._done: list[Completion] = []
        self._pending: set[Key] = set()
        self._addresses: tuple[int, ...] = ()

    # --- the protocol ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        check_request(request, self.policy.context)
        if request.key in self._pending:
            raise EngineError(
                f"request {'/'.join(map(str, request.key))} is at work already", fix="give it another key"
            )
        self._pending.add(request.key)
        ends = frozenset(end_ids(request.sampling, self._eos))
        self.scheduler.add(
            [
                Sequence(
                    request,
                    sample,
                    random_key(self.seed, *request.key, "sample", sample),
                    ends,
                    watcher(request, self.policy.tokenizer, self._tables),
                    self.version,
                )
                for sample in range(request.n)
            ]
        )

    def cancel(self, key: Key) -> None:
        """Every unfinished sample of the request ends as it is."""
        self._done += [sequence.completion("cancelled") for sequence in self.scheduler.cancel(key)]
        self._pending.discard(key)

    def completions(self) -> Iterator[Completion]:
        training = self.policy.module.training
        self.policy.module.eval()
        self._check_addresses()
        try:
            while self._done or not self.scheduler.is_idle:
                if not self._done:
                    self._work()
                while self._done:
                    yield self._done.pop(0)
        finally:
            self.policy.module.train(training)

    def update_weights(self, version: int) -> None:
        """The weights are the policy's own: only what was computed with the old ones has to be forgotten."""
        if not self.scheduler.is_idle:
            raise EngineError("weights changed while requests were at work", fix="finish or cancel them first")
        self.version = version
        self.pool.forget_all()

    def invalidate(self) -> None:
        self.runner.forget_graphs()
        self.pool.forget_all()

    def close(self) -> None:
        for name in {job.leader.request.key for job in self.scheduler.waiting} | self._pending:
            self.cancel(name)
        self._done.clear()
        self.runner.forget_graphs()

    def _check_addresses(self) -> None:
        """Graphs read the weights where they were captured: if any has moved, they are captured anew."""
        addresses = tuple(p.data_ptr() for p in self.policy.module.parameters())
        if addresses != self._addresses:
            self._addresses = addresses
            self.invalidate()

    # --- the work ----------------------------------------------------------------------------------------------

    @property
    def _eos(self) -> int:
        tokenizer = self.policy.tokenizer
        return -1 if tokenizer is None else int(tokenizer.eos_token_id)

    def _work(self) -> None:
        try:
            jobs = self.scheduler.next_prefill()
            if jobs:
                self._prefill(jobs)
            else:
                self._decode()
        except EngineError:
            self._drop_everything()
            raise

    def _prefill(self, jobs: list[tuple[Prefill, int]]) -> None:
        logits = self.runner.prefill([(job.leader, count) for job, count in jobs])
        started: list[Sequence] = []
        rows: list[int] = []
        for row, (job, count) in enumerate(jobs):
            copies = self.scheduler.prefilled(job, count)
            if job.left:
                continue
            if copies:
                self.cache.copy_blocks([c[1] for c in copies], [c[2] for c in copies])
            members = [job.leader, *job.followers]
            started += members
            rows += [row] * len(members)
        if started:
            results = self.runner.sample_first(logits[rows], started, self._eos)
            self._accept(started, *(x[None] for x in results))

    def _decode(self) -> None:
        plain = all(is_plain(s) for s in self.scheduler.running)
        longest = max(s.request.sampling.max_tokens - s.count for s in self.scheduler.running)
        steps = max(1, min(self._burst if plain else 1, longest))
        running = list(self.scheduler.reserve(steps))
        if not running:
            return
        tokens, logprobs, kept = self.runner.burst(running, steps, plain, self._eos)
        for sequence in running:
            sequence.cached += steps
        self._accept(running, tokens, logprobs, kept)

    def _accept(self, sequences: list[Sequence], tokens: np.ndarray, logprobs: np.ndarray, kept: np.ndarray) -> None:
        """Take (K, B) sampled tokens, and end the sequences that end with them."""
        if not np.isfinite(logprobs).all():
            raise EngineError("the model gave logits that are not numbers", fix="look at the last training steps")
        finished: set[int] = set()
        ends = list(set().union(*{sequence.end_ids for sequence in sequences}))
        may_end: list[bool] = list(np.isin(tokens, ends).any(axis=0))
        context = self.policy.context
        columns = zip(sequences, tokens.T.copy(), logprobs.T.copy(), kept.T.copy(), may_end, strict=True)
        for sequence, ids, their_logprobs, mass, maybe in columns:
            finish = sequence.accept(ids, their_logprobs, mass, context, maybe)
            if finish is not None:
                finished.add(id(sequence))
                sequence.cached = min(sequence.cached, sequence.length - 1)
                self.scheduler.finish(sequence)
                self._done.append(sequence.completion(finish))
        if finished:
            self.scheduler.running = [s for s in self.scheduler.running if id(s) not in finished]
            self._settle()

    def _settle(self) -> None:
        """Forget the keys of requests that are complete."""
        scheduler = self.scheduler
        at_work = {s.request.key for s in scheduler.running}
        for queue in (scheduler.waiting, scheduler.filling):
            at_work |= {job.leader.request.key for job in queue}
        self._pending &= at_work

    def _drop_everything(self) -> None:
        """After trouble: nothing is left half done, and the engine can be used again."""
        for name in list(self._pending):
            self.scheduler.cancel(name)
        self._pending.clear()
        self._done.clear()

    # --- memory ------------------------------------------------------------------------------------------------

    def _default_tokens(self, rows: int) -> int:
        if self.policy.device.type != "cuda":
            return CPU_CACHE_TOKENS
        free, _ = torch.cuda.mem_get_info(self.policy.device)
        return min(int(CACHE_SHARE * free / self._bytes_per_token()), rows * self.policy.context)

    def _layout(self) -> tuple[int, int, int]:
        """Layers, key heads and head size."""
        config = self.policy.causal.config.get_text_config()
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers, config.num_key_value_heads, dim

    def _bytes_per_token(self) -> int:
        layers, heads, dim = self._layout()
        return 2 * layers * heads * dim * self.policy.head.weight.element_size()

    def _make_cache(self) -> Cache:
        layers, heads, dim = self._layout()
        # One block more than sequences can own: rows that are not in use write to it.
        blocks = math.ceil(self.cache_tokens / self._block) + 1
        return Cache(layers, blocks, self._block, heads, dim, self.policy.head.weight.dtype, self.policy.device)
