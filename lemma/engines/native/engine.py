"""The native engine: continuous batching on the modules that are trained. No weights to copy or synchronise."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection

import numpy as np
import torch

from lemma.engines.native.paging import BlockPool
from lemma.engines.native.runner import BURST, LADDER, Burst, Runner
from lemma.engines.native.sampler import SamplingMode, sampling_mode
from lemma.engines.native.scheduler import Prefill, Scheduler
from lemma.engines.native.sequences import Intake, Readback, Sequence, accept_all, completions_of
from lemma.engines.native.sizes import default_prefill, default_tokens, make_cache, most_gathered
from lemma.engines.protocol import Completion, Engine, EngineError, Key, NewTokens, Request
from lemma.models.adapters import note_rows
from lemma.models.policy import Policy

BLOCK = 64
CPU_BLOCK = 16
# On a CPU reading the tokens is cheap, and steps after the end of a sequence are expensive.
CPU_BURST = 4
# Prompt tokens between two bursts where clients take turns: they cost about as much as a burst.
PART, CPU_PART = 2048, 64
# Steps of the first burst after prefill, which may be launched before the first tokens are read: just enough to keep
# the device busy until then. More would block the host, since the launch queue holds about a thousand kernels.
FIRST_BURST = 2
# Bursts are launched ahead while at most one row in this many ends unexpectedly (an end token or a stop string, not the
# length limit): such a row is computed for one extra burst.
ROWS_PER_UNEXPECTED_END = 16


class NativeEngine(Engine):
    """See `lemma.engines.protocol.Engine`. Not thread-safe: one thread at a time may use it."""

    name = "native"
    streams_tokens = True
    updates_in_flight = True

    def __init__(
        self,
        policy: Policy,
        seed: int = 0,
        *,
        cache_tokens: int | None = None,
        max_sequences: int | None = None,
        prefill_tokens: int | None = None,
        share_prefixes: bool = True,
        use_graphs: bool | None = None,
        burst: int | None = None,
        ahead: bool | None = None,
    ):
        self.policy = policy
        self.seed = seed
        self.version = 0
        on_gpu = policy.device.type == "cuda"
        self._fused = on_gpu
        self._burst = min(burst or (BURST if on_gpu else CPU_BURST), BURST)
        self._ahead = on_gpu if ahead is None else ahead
        # Steps of the first burst after prefill, on a GPU whatever `ahead` is, and of the next one.
        self._first_burst = min(FIRST_BURST, self._burst) if on_gpu or self._ahead else self._burst
        self._next_burst = self._burst
        self._block = BLOCK if on_gpu else CPU_BLOCK
        rows = min(max_sequences or LADDER[-1], LADDER[-1])
        self.cache_tokens = cache_tokens or default_tokens(policy, rows)
        self.cache = make_cache(policy, self.cache_tokens, self._block)
        self.pool = BlockPool(self.cache.shape[1] // self._block - 1, self._block)
        new_tokens = prefill_tokens or default_prefill(policy)
        self.scheduler = Scheduler(self.pool, rows, new_tokens, share_prefixes, most_gathered(policy))
        graphs = on_gpu if use_graphs is None else use_graphs
        self.runner = Runner(policy, self.cache, rows, policy.context, graphs, self._fused)
        self._intake = Intake(policy, self.capacity)
        self.finished: deque[Completion] = deque()
        self.new_tokens: deque[NewTokens] = deque()
        self.device_wait = threading.Event()
        # Whether the weights are where they were when work was last done.
        self._has_looked = False
        # The number of unfinished samples of each request.
        self._unfinished: dict[Key, int] = {}
        self._addresses: tuple[int, ...] = ()
        self._has_new_weights = policy.is_adapter
        # The burst that was launched ahead and is not read yet; how many were launched ahead in total; how many rows
        # ended unexpectedly in the last burst.
        self._in_flight: Burst | None = None
        self.bursts_ahead = 0
        self._unexpected_ends = 0
        self.context = policy.context

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds: the maximum length of a prompt and its completion together."""
        return self.pool.count * self.pool.size

    # --- the protocol ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        if not self._unfinished:
            self._intake.refresh()
            self._has_looked = False
        elif request.key in self._unfinished:
            raise EngineError(f"request {request.name} is already running", fix="give it another key")
        self._intake.check(request)
        self._unfinished[request.key] = request.n
        self.scheduler.add(self._intake.sequences(request, self.seed, self.version))

    def cancel(self, key: Key) -> None:
        """End every unfinished sample of the request, with the tokens it has so far."""
        self.finished += completions_of((sequence, "cancelled") for sequence in self.scheduler.cancel(key))
        self._unfinished.pop(key, None)

    @property
    def is_busy(self) -> bool:
        return not self.scheduler.is_idle

    def work(self) -> None:
        """Prefill, or one burst. The model is in eval mode then, and stays so: whoever learns sets the other.

        After any exception, Ctrl-C included, all requests are dropped.
        """
        if self.scheduler.is_idle:
            return
        if not self._has_looked:
            self._look_at_weights()
        if self.policy.module.training:
            self.policy.module.eval()
        try:
            if not self.cache.keys.nbytes:
                self.cache.allocate()
            if self._has_new_weights:
                note_rows(self.policy.module)
                self._has_new_weights = False
            jobs = [] if self._in_flight else self.scheduler.next_prefill()
            if jobs:
                self._prefill(jobs)
            else:
                self._decode()
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            self._drop_everything()
            raise _device_error(error) from error
        except BaseException:
            self._drop_everything()
            raise

    def update_weights(self, version: int) -> None:
        """The weights are the policy's own, so only the cached keys and values have to be dropped.

        Unfinished completions continue with the new weights, after their tokens so far have been prefilled again.
        """
        self.version, self._has_looked = version, False
        self._restart()
        for job in self.scheduler.waiting:
            for sequence in (job.leader, *job.followers):
                sequence.start_span(version)

    def take_turns(self) -> None:
        self.scheduler.part_tokens = min(PART if self._fused else CPU_PART, self.scheduler.prefill_tokens)

    def reset_prefix_cache(self) -> None:
        self._restart()

    def invalidate(self) -> None:
        self._has_looked = False
        self.runner.graphs.drop()
        self._restart()

    def close(self) -> None:
        self._drop_everything()
        self.invalidate()
        self.cache.release()

    def release_cache(self) -> None:
        """Free the cache's memory, for example before an update; unfinished completions are prefilled again later.

        Captured graphs stay valid: they read the cache's address from device memory.
        """
        self._restart()
        self.cache.release()

    def _restart(self) -> None:
        """Drop what the cache holds; tokens that are in flight and not read yet are sampled again."""
        self._in_flight, self._unexpected_ends = None, 0
        self.scheduler.restart()
        self._has_new_weights = self.policy.is_adapter

    def _look_at_weights(self) -> None:
        """Captured graphs hold the addresses of the weights: if any has moved since the last look, they are captured
        again. Looked at when work begins, and after an update."""
        addresses = tuple(parameter.data_ptr() for parameter in self.policy.module.parameters())
        if addresses != self._addresses:
            self._addresses = addresses
            self.invalidate()
        self._has_looked = True

    # --- the work ----------------------------------------------------------------------------------------------

    def _prefill(self, jobs: list[tuple[Prefill, int]]) -> None:
        """Prefill all prompts that can start now, pass by pass. Their first tokens are read only after every pass, and
        if possible the burst after them, has been launched, so that the device does not wait for the host in between.
        A prompt that needs several passes gets one per call: requests may be submitted or cancelled between them. So do
        all where clients take turns."""
        takes_turns = self.scheduler.part_tokens is not None
        first_tokens: list[Burst] = []
        while jobs:
            first_tokens += self._prefill_pass(jobs)
            is_long = any(job.left > self.scheduler.prefill_tokens for job, _ in jobs)
            jobs = [] if is_long or takes_turns else self.scheduler.next_prefill()
        if not first_tokens:
            return
        self._next_burst = self._first_burst
        continuing = self._continuing() if self._ahead else []
        if continuing:
            launched = [s.launched for s in continuing]
            mode = sampling_mode(continuing, self.runner.has_cut_kernels, self._intake.eos, launched)
            self._in_flight = self._launch_ahead(continuing, mode, first_tokens)
        for burst in first_tokens:
            self._accept(burst.sequences, *self._read(burst))
        if self._in_flight:
            self._count_unexpected_ends(continuing)

    def _prefill_pass(self, jobs: list[tuple[Prefill, int]]) -> list[Burst]:
        """One forward pass over prompts; the first tokens of the prompts that it completes."""
        logits = self.runner.prefill([(job.leader, count) for job, count in jobs])
        started: list[Sequence] = []
        rows: list[int] = []
        copies: list[tuple[int, int]] = []
        for row, (job, count) in enumerate(jobs):
            copies += self.scheduler.prefilled(job, count)
            if job.left:
                continue
            members = [job.leader, *job.followers]
            started += members
            rows += [row] * len(members)
        self.cache.copy_blocks(copies)
        return [self.runner.sample_first(logits, rows, started, self._intake.eos)] if started else []

    def _decode(self) -> None:
        """Read one burst. If possible the next one is launched first, so that the device works while the host reads.

        Invariant: while a burst is in flight, sequences may end, but none starts, is preempted or is launched from the
        host's copy of its state. Rows of sequences that have ended since the launch are skipped when it is read.
        """
        burst = self._in_flight or self._launch_next()
        if burst is None:
            return
        continuing = self._continuing() if self._ahead else []
        self._in_flight = self._launch_ahead(continuing, burst.mode) if continuing else None
        alive = [row for row, sequence in enumerate(burst.sequences) if sequence.blocks]
        if len(alive) == len(burst.sequences):
            self._accept(burst.sequences, *self._read(burst))
        elif alive:
            self._accept([burst.sequences[row] for row in alive], *(x[:, alive] for x in self._read(burst)))
        if self._ahead:
            self._count_unexpected_ends(continuing)

    def _continuing(self) -> list[Sequence]:
        """Running sequences that do not reach their maximum length with what has been launched."""
        return [s for s in self.scheduler.running if s.limit > s.launched]

    def _count_unexpected_ends(self, continuing: list[Sequence]) -> None:
        """Count the sequences that were expected to continue and have ended."""
        self._unexpected_ends = sum(not sequence.blocks for sequence in continuing)
        if not self.scheduler.running:
            self._in_flight, self._unexpected_ends = None, 0

    def _launch_next(self) -> Burst | None:
        """A burst of all running sequences for which there are blocks; the host has read all their tokens."""
        running = self.scheduler.running
        launched = [s.launched for s in running]
        mode = sampling_mode(running, self.runner.has_cut_kernels, self._intake.eos, launched)
        left = max(s.limit - count for s, count in zip(running, launched, strict=True))
        steps = min(1 if mode == "host" else self._next_burst, left)
        running = list(self.scheduler.reserve(steps))
        return self._launch(running, steps, mode) if running else None

    def _launch_ahead(
        self, continuing: list[Sequence], mode: SamplingMode, first_tokens: Collection[Burst] = ()
    ) -> Burst | None:
        """Launch a burst before the last one, or `first_tokens`, are read; None if the host has to act first: start a
        sequence, sample itself, find blocks. The decision does not depend on timing."""
        scheduler = self.scheduler
        may_start = scheduler.prefilling or (scheduler.waiting and len(continuing) < scheduler.max_sequences)
        end_often = self._unexpected_ends * ROWS_PER_UNEXPECTED_END > len(continuing)
        if mode == "host" or may_start or end_often:
            return None
        steps = min(self._next_burst, max(s.limit - s.launched for s in continuing))
        if not scheduler.reserve_ahead(continuing, steps):
            return None
        self.bursts_ahead += 1
        return self._launch(continuing, steps, mode, first_tokens)

    def _launch(
        self, sequences: list[Sequence], steps: int, mode: SamplingMode, first_tokens: Collection[Burst] = ()
    ) -> Burst:
        self._next_burst = self._burst
        burst = self.runner.launch(sequences, steps, mode, self._intake.eos, first_tokens)
        for sequence in sequences:
            sequence.cached += steps
        return burst

    def _read(self, burst: Burst) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, log-probabilities and kept mass, each (steps, B), once the device is done with them."""
        if burst.done is not None:
            assert self.device_wait is not None
            self.device_wait.set()
            burst.done.synchronize()
            self.device_wait.clear()
        return burst.tokens_KB.numpy(), burst.logprobs_KB.numpy(), burst.kept_KB.numpy()

    def _accept(self, sequences: list[Sequence], tokens: np.ndarray, logprobs: np.ndarray, kept: np.ndarray) -> None:
        """Append (K, B) sampled tokens, and finish the sequences that end with them."""
        if not np.isfinite(logprobs).all():
            self.cache.clear()
            raise EngineError("the model gave logits that are not numbers", fix="look at the last training steps")
        ends = list(set().union(*{sequence.end_ids for sequence in sequences}))
        may_end = np.logical_or.reduce(np.isin(tokens, ends), axis=0).tolist()
        ended = accept_all(sequences, Readback(tokens.T.copy(), logprobs.T.copy(), kept.T.copy()), may_end)
        self.sampled_tokens += tokens.size - sum(len(tokens) - len(sequence.newest) for sequence, _ in ended)
        self.new_tokens += [
            NewTokens(sequence.request.key, sequence.sample, sequence.newest)
            for sequence in sequences
            if sequence.request.stream
        ]
        if ended:
            self.scheduler.finish([sequence for sequence, _ in ended])
            self.finished += completions_of(ended)
            for sequence, _ in ended:  # after the last sample of a request its key may be used again
                key = sequence.request.key
                if left := self._unfinished.pop(key, 1) - 1:
                    self._unfinished[key] = left

    def _drop_everything(self) -> None:
        """After an error: drop all requests, so that the engine can be used again."""
        self._in_flight, self._unexpected_ends = None, 0
        self.scheduler.drop_all()
        self._unfinished.clear()
        self.finished.clear()
        self.new_tokens.clear()


def _device_error(error: RuntimeError) -> EngineError:
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError(
            "the GPU ran out of memory while generating, and the requests are dropped",
            fix="give the engine a smaller cache, fewer sequences or fewer prefill_tokens",
        )
    first = str(error).strip().splitlines()[0]
    return EngineError(
        f"the GPU failed while generating ({first}), and the requests are dropped", fix="start the program again"
    )
