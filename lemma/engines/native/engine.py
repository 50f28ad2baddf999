"""The native engine: continuous batching on the very modules that train. Nothing to copy, nothing to synchronise."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from lemma.engines.native.cached_attention import Cache
from lemma.engines.native.flat_modules import Modules
from lemma.engines.native.intake import Intake
from lemma.engines.native.paging import BlockPool
from lemma.engines.native.pass_sizes import default_prefill, layout, most_gathered
from lemma.engines.native.runner import BURST, LADDER, Burst, Runner
from lemma.engines.native.sampler import Way, way_of
from lemma.engines.native.scheduler import Prefill, Scheduler
from lemma.engines.native.sequences import Read, Sequence, accept_all, completions_of
from lemma.engines.protocol import Completion, Engine, EngineError, Key, Listener, Request
from lemma.models.policy import Policy

BLOCK = 64
CPU_BLOCK = 16
# Share of the free GPU memory that the cache takes where no size is given.
CACHE_SHARE = 0.5
CPU_CACHE_TOKENS = 65536
# On a CPU looking at the tokens costs little, and steps after the end of a sequence cost much.
CPU_BURST = 4
# Steps of the burst after first tokens, which may be launched before those are read: as many as keep the device busy
# meanwhile. More would keep the host, since a device takes about a thousand kernels ahead.
FIRST_BURST = 2
# A burst is launched before the last one is read while at most one row in so many ends unforeseen: such a row is
# computed for one burst more.
ROWS_PER_SURPRISE = 16


class NativeEngine(Engine):
    """See `lemma.engines.protocol.Engine`. One thread at a time uses it."""

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
        # Whether first tokens were drawn since the last burst. What is launched ahead has the bursts of what is not.
        self._begins = False
        self._first_burst = min(FIRST_BURST, self._burst) if on_gpu or self._ahead else self._burst
        self._block = BLOCK if on_gpu else CPU_BLOCK
        rows = min(max_sequences or LADDER[-1], LADDER[-1])
        self.cache_tokens = cache_tokens or self._default_tokens(rows)
        self.cache = self._make_cache()
        self.pool = BlockPool(self.cache.shape[1] // self._block - 1, self._block)
        new_tokens = prefill_tokens or default_prefill(policy)
        self.scheduler = Scheduler(self.pool, rows, new_tokens, share_prefixes, most_gathered(policy))
        graphs = on_gpu if use_graphs is None else use_graphs
        self.runner = Runner(policy, self.cache, rows, policy.context, graphs, self._fused)
        self._intake = Intake(policy)
        self._done: deque[Completion] = deque()
        # How many samples of each request are not complete.
        self._unfinished: dict[Key, int] = {}
        self._addresses: tuple[int, ...] = ()
        # The burst that was launched before the last one was read; how many of those there were in all; how many rows
        # ended unforeseen in the last one.
        self._flying: Burst | None = None
        self.bursts_ahead = 0
        self._surprises = 0
        self.context = policy.context
        self.on_tokens: Listener | None = None
        # Entered for as long as the engine waits for the device: when another thread may use the interpreter.
        self.while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def room(self) -> int:
        """Tokens that the cache holds; no prompt and answer together may be longer."""
        return self.pool.count * self.pool.size

    # --- the protocol ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        if not self._unfinished:
            self._intake.refresh()
        elif request.key in self._unfinished:
            raise EngineError(f"request {request.name} is at work already", fix="give it another key")
        self._intake.check(request, self.room)
        self._unfinished[request.key] = request.n
        self.scheduler.add(self._intake.sequences(request, self.seed, self.version))

    def cancel(self, key: Key) -> None:
        """Every unfinished sample of the request ends as it is."""
        self._done += completions_of((sequence, "cancelled") for sequence in self.scheduler.cancel(key))
        self._unfinished.pop(key, None)

    def completions(self) -> Iterator[Completion]:
        """Whoever leaves this half way loses nothing: the next call goes on with what is unfinished."""
        modules = Modules(self.policy.module)
        self._check_addresses(modules)
        while self._done or not self.scheduler.is_idle:
            if not self._done:
                self._work_until_done(modules)
            while self._done:
                yield self._done.popleft()

    @property
    def finished(self) -> deque[Completion]:
        return self._done

    def update_weights(self, version: int) -> None:
        """The weights are the policy's own: only what was computed with the old ones has to be forgotten.

        Unfinished completions go on with the new ones: what they have is computed again, and later tokens are theirs.
        """
        self.version = version
        self._restart()
        for job in self.scheduler.waiting:
            for sequence in (job.leader, *job.followers):
                sequence.renew(version)

    def reset_prefix_cache(self) -> None:
        self._restart()

    def invalidate(self) -> None:
        self.runner.forget_graphs()
        self._restart()

    def close(self) -> None:
        self._drop_everything()
        self.invalidate()
        self.cache.release()

    def release_cache(self) -> None:
        """Give the cache's memory back, as before an update of the weights; unfinished completions are computed again.

        Graphs stay: they learn from the device where the cache is.
        """
        self._restart()
        self.cache.release()

    def take_cache(self) -> None:
        """Take the memory again, wherever it is now; done by itself when there is work."""
        if not self.cache.bytes:
            self.cache.take()

    def _restart(self) -> None:
        """What the cache holds is forgotten; tokens that nobody has read yet are drawn again."""
        self._ground()
        self.scheduler.restart()

    def _check_addresses(self, modules: Modules) -> None:
        """Graphs read the weights where they were captured: if any has moved, they are captured anew."""
        addresses = modules.addresses()
        if addresses != self._addresses:
            self._addresses = addresses
            self.invalidate()

    # --- the work ----------------------------------------------------------------------------------------------

    def _work_until_done(self, modules: Modules) -> None:
        """Go on until something has ended. The module is in its own mode again when others look at it."""
        is_training = self.policy.module.training
        if is_training:
            modules.train(False)
        try:
            while not self._done and not self.scheduler.is_idle:
                self._work()
                if self.between_steps is not None:
                    self.between_steps()
        finally:
            if is_training:
                modules.train(True)

    def _work(self) -> None:
        """One forward pass or burst. Trouble, Ctrl-C included, may strike anywhere: then everything is dropped."""
        try:
            self.take_cache()
            jobs = [] if self._flying else self.scheduler.next_prefill()
            if jobs:
                self._prefill(jobs)
            else:
                self._decode()
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            self._drop_everything()
            raise _device_trouble(error) from error
        except BaseException:
            self._drop_everything()
            raise

    def _prefill(self, jobs: list[tuple[Prefill, int]]) -> None:
        """Compute all prompts that can begin now, pass after pass; their first tokens are read when all are under way,
        and where it is safe the burst after them too, so that the device does not wait for the host in between. A
        prompt of several passes takes one at a time: others may be submitted or cancelled meanwhile."""
        begun: list[Burst] = []
        while jobs:
            begun += self._prefill_pass(jobs)
            is_long = any(job.left > self.scheduler.prefill_tokens for job, _ in jobs)
            jobs = [] if is_long else self.scheduler.next_prefill()
        if not begun:
            return
        self._begins = True
        stay = self._staying()
        if stay and self._ahead:
            self._flying = self._launch_ahead(stay, self._way_of(stay), begun)
        for burst in begun:
            self._accept(burst.sequences, *self._read(burst))
        if self._flying:
            self._look_back(stay)

    def _prefill_pass(self, jobs: list[tuple[Prefill, int]]) -> list[Burst]:
        """One forward pass over prompts; the first tokens of those that are complete with it."""
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
        """Read one burst. Where it is safe the next is launched before, so that the device works while the host reads.

        Invariant: while a burst flies, sequences may end, but none begins, gives way or is launched from the host's
        knowledge. Those that have ended meanwhile are passed over when it is read.
        """
        burst = self._flying or self._launch_next()
        if burst is None:
            return
        stay = self._staying()
        self._flying = self._launch_ahead(stay, burst.way)
        alive = [row for row, sequence in enumerate(burst.sequences) if sequence.blocks]
        if len(alive) == len(burst.sequences):
            self._accept(burst.sequences, *self._read(burst))
        elif alive:
            self._accept([burst.sequences[row] for row in alive], *(x[:, alive] for x in self._read(burst)))
        self._look_back(stay)

    def _staying(self) -> list[Sequence]:
        """Those that do not reach their length with what is launched."""
        return [s for s in self.scheduler.running if s.limit > s.launched]

    def _look_back(self, stay: list[Sequence]) -> None:
        """Count those that have ended and could not be foreseen to."""
        self._surprises = sum(not sequence.blocks for sequence in stay)
        if not self.scheduler.running:
            self._ground()

    def _ground(self) -> None:
        """Nothing is read of what was launched, and nothing of the past bears on the future."""
        self._flying = None
        self._surprises = 0

    def _way_of(self, sequences: list[Sequence]) -> Way:
        """How the tokens are drawn that come after all that were launched."""
        return way_of(sequences, self.runner.cuts_by_kernels, self._intake.eos, [s.launched for s in sequences])

    def _launch_next(self) -> Burst | None:
        """A burst of everybody for whom there are blocks; the host knows all their tokens."""
        running = self.scheduler.running
        way = self._way_of(running)
        steps = min(1 if way == "host" else self._most_steps, max(s.limit - s.launched for s in running))
        running = list(self.scheduler.reserve(steps))
        return self._launch(running, steps, way) if running else None

    def _launch_ahead(self, stay: list[Sequence], way: Way, begun: Collection[Burst] = ()) -> Burst | None:
        """A burst of those that stay before the last one is read, or before first tokens are that have `begun`, unless
        the host has to do something first: begin a sequence, choose tokens itself, find blocks. Time plays no part in
        this."""
        scheduler = self.scheduler
        may_begin = scheduler.filling or (scheduler.waiting and len(stay) < scheduler.max_sequences)
        if not (self._ahead and way != "host" and stay) or may_begin or self._surprises * ROWS_PER_SURPRISE > len(stay):
            return None
        steps = min(self._most_steps, max(s.limit - s.launched for s in stay))
        if not scheduler.reserve_ahead(stay, steps):
            return None
        self.bursts_ahead += 1
        return self._launch(stay, steps, way, begun)

    @property
    def _most_steps(self) -> int:
        return self._first_burst if self._begins else self._burst

    def _launch(self, sequences: list[Sequence], steps: int, way: Way, begun: Collection[Burst] = ()) -> Burst:
        self._begins = False
        burst = self.runner.launch(sequences, steps, way, self._intake.eos, begun)
        for sequence in sequences:
            sequence.cached += steps
        return burst

    def _read(self, burst: Burst) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if burst.done is not None:
            with self.while_waiting():
                burst.done.synchronize()
        return burst.read()

    def _accept(self, sequences: list[Sequence], tokens: np.ndarray, logprobs: np.ndarray, kept: np.ndarray) -> None:
        """Take (K, B) sampled tokens, and end the sequences that end with them."""
        if not np.isfinite(logprobs).all():
            self.cache.clear()
            raise EngineError("the model gave logits that are not numbers", fix="look at the last training steps")
        ends = list(set().union(*{sequence.end_ids for sequence in sequences}))
        may_end = np.logical_or.reduce(np.isin(tokens, ends), axis=0).tolist()
        ended = accept_all(sequences, Read(tokens.T.copy(), logprobs.T.copy(), kept.T.copy()), may_end)
        if self.on_tokens is not None:
            for sequence in sequences:
                self.on_tokens(sequence.request.key, sequence.sample, sequence.newest)
        if ended:
            self.scheduler.finish([sequence for sequence, _ in ended])
            self._done += completions_of(ended)
            for sequence, _ in ended:
                self._count_off(sequence.request.key)

    def _count_off(self, key: Key) -> None:
        """One more sample of a request is complete; the key of one that is complete as a whole is forgotten."""
        left = self._unfinished.pop(key, 1) - 1
        if left:
            self._unfinished[key] = left

    def _drop_everything(self) -> None:
        """After trouble: nothing is left half done, and the engine can be used again."""
        self._ground()
        self.scheduler.drop_all()
        self._unfinished.clear()
        self._done.clear()

    # --- memory ------------------------------------------------------------------------------------------------

    def _default_tokens(self, rows: int) -> int:
        if self.policy.device.type != "cuda":
            return min(CPU_CACHE_TOKENS, rows * self.policy.context)
        device = self.policy.device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        return min(int(CACHE_SHARE * free / bytes_per_token(self.policy)), rows * self.policy.context)

    def _make_cache(self) -> Cache:
        layers, heads, dim = layout(self.policy)
        # One block more than sequences can own: rows that are not in use write to it.
        blocks = math.ceil(self.cache_tokens / self._block) + 1
        return Cache(layers, blocks, self._block, heads, dim, self.policy.dtype, self.policy.device)


def bytes_per_token(policy: Policy) -> int:
    """What the cache needs for each token it holds."""
    layers, heads, dim = layout(policy)
    return 2 * layers * heads * dim * policy.head.weight.element_size()


def _device_trouble(error: RuntimeError) -> EngineError:
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError(
            "the GPU ran out of memory while generating, and the requests are dropped",
            fix="give the engine a smaller cache, fewer sequences or fewer prefill_tokens",
        )
    first = str(error).strip().splitlines()[0]
    return EngineError(
        f"the GPU failed while generating ({first}), and the requests are dropped", fix="start the program again"
    )
