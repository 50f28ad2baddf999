"""Forward passes of the engine on the policy's own modules: prompts, and bursts of single tokens.

A burst is several decoding steps without the host: each step's tokens are the next one's input. On a GPU a step is one
CUDA graph, captured for a ladder of batch sizes, and nothing in the launch of a burst waits for the one before it.
Shapes: B rows, M blocks of the longest row, K steps of a burst.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from lemma.core.errors import LemmaWarning
from lemma.engines.native.batched_copy import copy_together
from lemma.engines.native.cached_attention import Cache, DecodeContext, PrefillContext
from lemma.engines.native.noise import halves
from lemma.engines.native.sampler import Cuts, Way, draw, draw_cut, kernels_cut, temperatures, way_of
from lemma.engines.native.sequences import Sequence
from lemma.models.adapters import fold_adapters
from lemma.models.packing import Segments
from lemma.models.policy import Policy

LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
BURST = 16


@dataclass
class Batch:
    """The tensors of a decoding step. In a graph they stay where they are and are filled anew."""

    ids_B: torch.Tensor
    positions_B: torch.Tensor
    table_BM: torch.Tensor
    keys_B2: torch.Tensor
    inverse_B: torch.Tensor
    noisy_B: torch.Tensor
    cuts: Cuts
    step: torch.Tensor
    tokens_KB: torch.Tensor
    logprobs_KB: torch.Tensor
    kept_KB: torch.Tensor

    @classmethod
    def empty(cls, rows: int, blocks: int, device: torch.device) -> Batch:

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            ids_B=zeros(rows),
            positions_B=zeros(rows),
            table_BM=zeros(rows, blocks, dtype=torch.int32),
            keys_B2=zeros(rows, 2),
            inverse_B=zeros(rows, dtype=torch.float32),
            noisy_B=zeros(rows, dtype=torch.float32),
            cuts=Cuts.empty(rows, device),
            step=zeros(1),
            tokens_KB=zeros(BURST, rows),
            logprobs_KB=zeros(BURST, rows, dtype=torch.float32),
            kept_KB=zeros(BURST, rows, dtype=torch.float32),
        )

    def first(self, rows: int) -> Batch:
        """The first rows of the same tensors."""
        return Batch(
            self.ids_B[:rows],
            self.positions_B[:rows],
            self.table_BM[:rows],
            self.keys_B2[:rows],
            self.inverse_B[:rows],
            self.noisy_B[:rows],
            self.cuts.first(rows),
            self.step,
            self.tokens_KB[:, :rows],
            self.logprobs_KB[:, :rows],
            self.kept_KB[:, :rows],
        )


@dataclass
class Burst:
    """Steps that are under way for some sequences. `done` comes after them, not after what was launched later. First
    tokens stay on the device too, in `first_B`: the next step can begin with them before the host has read them."""

    sequences: list[Sequence]
    steps: int
    way: Way
    tokens_KB: torch.Tensor
    logprobs_KB: torch.Tensor
    kept_KB: torch.Tensor
    done: torch.cuda.Event | None
    first_B: torch.Tensor | None = None

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, log-probabilities and kept mass, each (steps, B), once they are done."""
        return self.tokens_KB.numpy(), self.logprobs_KB.numpy(), self.kept_KB.numpy()


class Runner:
    """Computes; knows nothing of queues. Rows beyond those in use write to block 0, which no sequence owns."""

    def __init__(self, policy: Policy, cache: Cache, max_rows: int, context: int, use_graphs: bool, fused: bool):
        self.policy = policy
        self.cache = cache
        self.fused = fused
        self.use_graphs = use_graphs
        self.captures = 0
        self._on_gpu = policy.device.type == "cuda"
        if fused:
            fold_adapters(policy.module)
        blocks = -(-(context + BURST) // cache.block)
        self.buffers = Batch.empty(max_rows, blocks, policy.device)
        self._graphs: dict[tuple[Way, int], Any] = {}
        self._logits: dict[tuple[Way, int], torch.Tensor] = {}
        self._pool: Any = None
        self._nothing = torch.empty(0)
        self._cuts: bool | None = None
        # The sequences whose state the buffers hold, and how many blocks of each are in the table.
        self._rows: list[int] = []
        self._widths: list[int] = []

    def cuts_by_kernels(self) -> bool:
        """Whether kernels cut the support; tried once."""
        if self._cuts is None:
            self._cuts = self.fused and kernels_cut(self.policy.device, self.policy.dtype, self.policy.logit_map)
        return self._cuts

    def forget_graphs(self) -> None:
        self._graphs.clear()
        self._logits.clear()
        self._pool = None

    # --- prompts -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, parts: Rows[tuple[Sequence, int]]) -> torch.Tensor:
        """Put the next tokens of some sequences into the cache; logits (B, V) after the last of each."""
        device = self.policy.device
        new = [count for _, count in parts]
        total = [sequence.cached + count for sequence, count in parts]
        ids_T = np.concatenate([s.tokens[s.cached : s.cached + count] for s, count in parts])
        places, positions = _places([s.blocks for s, _ in parts], total, self.cache.block)
        arrays = [ids_T.astype(np.int64, copy=False), places, positions, np.cumsum(new) - 1]
        if new != total:
            is_new = positions >= np.repeat([s.cached for s, _ in parts], total)
            arrays[1:3] = [places[is_new], positions[is_new]]
            arrays.append(places)
        ids_T, slots_T, positions_T, last_B, *sources = self._put(*arrays)
        segments = Segments(tuple(new), device)
        context = PrefillContext(
            self.cache,
            slots_T,
            segments,
            Segments(tuple(total), device) if sources else segments,
            sources[0] if sources else None,
            self.fused,
        )
        return self._head(self._hidden(ids_T, positions_T, context)[last_B])

    @torch.no_grad()
    def sample_first(self, logits_BV: torch.Tensor, rows: list[int], sequences: list[Sequence], eos: int) -> Burst:
        """Begin to draw the first token after a prompt; `rows` says whose logits are whose."""
        way, means = way_of(sequences, self.cuts_by_kernels, eos), self.policy.logit_map
        keys, lengths = halves([s.noise_key for s in sequences]), np.array([s.length for s in sequences])
        arrays = [np.array(rows), keys, lengths, *temperatures(sequences)]
        if way == "cut":
            arrays += [part.numpy() for part in Cuts.of(sequences, eos)]
        rows_B, keys_B2, positions_B, inverse, noisy, *cuts = self._put(*arrays)
        if rows != list(range(len(logits_BV))):
            logits_BV = logits_BV[rows_B]
        if way == "host":
            drawn = draw_cut(logits_BV, sequences, keys_B2, positions_B, 0, eos, means)
        else:
            limits = Cuts(*cuts) if cuts else None
            drawn = draw(logits_BV, keys_B2, positions_B, inverse, noisy, self.fused, means, limits)
        burst = self._under_way(sequences, 1, way, *(part[None] for part in drawn))
        burst.first_B = drawn[0]
        return burst

    # --- bursts ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, sequences: list[Sequence], steps: int, way: Way, eos: int, begun: Collection[Burst] = ()) -> Burst:
        """Begin to draw `steps` more tokens of each sequence. `begun` are first tokens that the host has not read."""
        rows = len(sequences)
        size = next(s for s in LADDER if s >= rows) if self.use_graphs else rows
        batch = self.buffers.first(size)
        self._fill(batch, sequences, way, eos, begun)
        for number in range(steps):
            logits_BV = self._step(batch, way)
            if way == "host":
                keys, positions = batch.keys_B2[:rows], batch.positions_B[:rows] + 1
                drawn = draw_cut(logits_BV[:rows], sequences, keys, positions, number, eos, self.policy.logit_map)
                for kept_there, values in zip((batch.tokens_KB, batch.logprobs_KB, batch.kept_KB), drawn, strict=True):
                    kept_there[number, :rows] = values
                batch.ids_B[:rows] = drawn[0]
                batch.positions_B.add_(1)
        results = (batch.tokens_KB, batch.logprobs_KB, batch.kept_KB)
        return self._under_way(sequences, steps, way, *(part[:steps, :rows] for part in results))

    def _under_way(
        self,
        sequences: list[Sequence],
        steps: int,
        way: Way,
        tokens_KB: torch.Tensor,
        logprobs_KB: torch.Tensor,
        kept_KB: torch.Tensor,
    ) -> Burst:
        """Tokens on their way to the host."""
        tokens_KB, logprobs_KB, kept_KB = (self._fetch(part) for part in (tokens_KB, logprobs_KB, kept_KB))
        done = None
        if self._on_gpu:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.policy.device))
        return Burst(sequences, steps, way, tokens_KB, logprobs_KB, kept_KB, done)

    def _fill(self, batch: Batch, sequences: Rows[Sequence], way: Way, eos: int, begun: Collection[Burst]) -> None:
        """Bring the batch up to date. Rows of the last burst without the host go on from what the device knows of them,
        which may be more than the host has read; only the blocks that they were given are new."""
        names = [s.turn for s in sequences] if way != "host" else []
        row_of = {name: row for row, name in enumerate(self._rows)}
        if way != "host" and all(name in row_of for name in names):
            if names != self._rows:
                self._compact(batch, [row_of[name] for name in names], way)
            self._fill_table(batch, sequences, [i for i, s in enumerate(sequences) if len(s.blocks) != self._widths[i]])
            batch.step.zero_()
            batch.positions_B[len(sequences) :] = 0
        else:
            self._fill_all(batch, sequences, way, eos, begun)
        self._rows, self._widths = names, [len(s.blocks) for s in sequences]

    def _compact(self, batch: Batch, stay: list[int], way: Way) -> None:
        """Put the rows that stay side by side, and let those that are not in use any more own nothing."""
        (rows,), old = self._put(np.array(stay)), self.buffers
        kept = [old.ids_B, old.positions_B, old.table_BM, old.keys_B2, old.inverse_B, old.noisy_B]
        for tensor in (*kept, *(old.cuts if way == "cut" else ())):
            tensor[: len(stay)] = tensor[rows]
        batch.table_BM[len(stay) :] = 0
        self._widths = [self._widths[row] for row in stay]

    def _fill_table(self, batch: Batch, sequences: Rows[Sequence], changed: list[int]) -> None:
        if not changed:
            return
        table = _table([sequences[i].blocks for i in changed])
        rows, blocks = self._put(np.array(changed), table)
        batch.table_BM[rows, : table.shape[1]] = blocks

    def _fill_all(self, batch: Batch, sequences: Rows[Sequence], way: Way, eos: int, begun: Collection[Burst]) -> None:
        """Everything about these rows. Cuts only where they are looked at: rows that need none will never need any."""
        first = {s.turn: place for place, s in enumerate(s for burst in begun for s in burst.sequences)}
        assert all(s.cached == s.length - (s.turn not in first) for s in sequences), "a burst of these is not read"
        unread = [row for row, s in enumerate(sequences) if s.turn in first]
        rows, size = len(sequences), len(batch.ids_B)
        numbers = np.zeros((2, size), dtype=np.int64)
        numbers[0, :rows] = [0 if s.turn in first else s.last for s in sequences]
        numbers[1, :rows] = [s.cached for s in sequences]
        reals = np.ones((2, size), dtype=np.float32)
        reals[:, :rows] = temperatures(sequences)
        table = _table([*(s.blocks for s in sequences), *([[]] * (size - rows))])
        arrays = [*numbers, table, halves([s.noise_key for s in sequences]), *reals]
        targets = [batch.ids_B, batch.positions_B, batch.table_BM[:, : table.shape[1]], batch.keys_B2[:rows]]
        targets += [batch.inverse_B, batch.noisy_B]
        if way == "cut":
            arrays += [part.numpy() for part in Cuts.of(sequences, eos)]
            targets += batch.cuts.first(rows)
        places = [first[sequences[row].turn] for row in unread]
        *values, into, taken = self._put(*arrays, *np.array([unread, places], dtype=np.int64))
        for there, value in zip(targets, values, strict=True):
            there.copy_(value)
        if unread:
            batch.ids_B[into] = torch.cat([burst.first_B for burst in begun])[taken]
        batch.step.zero_()

    def _put(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return copy_together(list(arrays), self.policy.device)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy for the host, which the next burst does not touch; there when the device has come to it."""
        if not self._on_gpu:
            return tensor.clone()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def _step(self, batch: Batch, way: Way) -> torch.Tensor:
        """One token for every row, through a graph where there are graphs. The logits (B, V): a graph that samples
        keeps none, so that all graphs can use the same memory for theirs."""
        if not self.use_graphs:
            return self._compute(batch, way)
        size = len(batch.ids_B)
        name = way, size
        if name not in self._graphs:
            self._try_to_capture(name, batch)
        if not self.use_graphs:
            return self._compute(batch, way)
        self._graphs[name].replay()
        return self._logits.get(name, self._nothing)

    def _compute(self, batch: Batch, way: Way) -> torch.Tensor:
        block = self.cache.block
        positions = batch.positions_B
        blocks = batch.table_BM.gather(1, (positions // block)[:, None])[:, 0].long()
        context = DecodeContext(
            self.cache, batch.table_BM, positions + 1, blocks * block + positions % block, self.fused
        )
        logits_BV = self._head(self._hidden(batch.ids_B, positions, context))
        if way != "host":
            settings = (batch.inverse_B, batch.noisy_B, self.fused, self.policy.logit_map)
            cuts = batch.cuts if way == "cut" else None
            tokens, logprobs, kept = draw(logits_BV, batch.keys_B2, positions + 1, *settings, cuts)
            batch.tokens_KB.index_copy_(0, batch.step, tokens[None])
            batch.logprobs_KB.index_copy_(0, batch.step, logprobs.float()[None])
            batch.kept_KB.index_copy_(0, batch.step, kept.float()[None])
            batch.ids_B.copy_(tokens)
            batch.positions_B.add_(1)
            batch.step.add_(1)
        return logits_BV

    def _try_to_capture(self, name: tuple[Way, int], batch: Batch) -> None:
        """Capture, or do without graphs from now on: some layers ask the device how much there is to do (a mixture's
        experts in float32), which no graph can hold."""
        before = [x.clone() for x in (batch.ids_B, batch.positions_B, batch.step)]
        try:
            self._capture(name, batch, before)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = (str(error).strip().splitlines() or [""])[0]
            kind = type(self.policy.causal).__name__
            message = f"{kind} cannot be decoded through CUDA graphs ({first}); the engine does without, and is slower"
            warnings.warn(message, LemmaWarning, stacklevel=2)
            self.use_graphs = False
            self.forget_graphs()
            self._restore(batch, before)

    def _capture(self, name: tuple[Way, int], batch: Batch, before: list[torch.Tensor]) -> None:
        """Record a step as a graph. Running it to warm up moves the batch on, so the batch is put back afterwards."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._compute(batch, name[0])
                self._restore(batch, before)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What another thread asks of the device meanwhile is none of this graph's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_BV = self._compute(batch, name[0])
        if name[0] == "host":
            self._logits[name] = logits_BV
        self._pool = self._pool or graph.pool()
        self._graphs[name] = graph
        self.captures += 1
        self._restore(batch, before)

    @staticmethod
    def _restore(batch: Batch, before: list[torch.Tensor]) -> None:
        for tensor, value in zip((batch.ids_B, batch.positions_B, batch.step), before, strict=True):
            tensor.copy_(value)

    # --- the model ---------------------------------------------------------------------------------------------

    def _hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, cached: Any) -> torch.Tensor:
        return self.policy.hidden_cached(ids_T, positions_T, cached)

    def _head(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """What the head puts out; whoever draws from it knows what the model makes of it (`Policy.logit_map`)."""
        logits = hidden_BH @ self.policy.head.weight.to(hidden_BH.dtype).T
        bias = getattr(self.policy.head, "bias", None)
        return logits if bias is None else logits + bias


def _table(blocks: Rows[list[int]]) -> np.ndarray:
    """The blocks of each row side by side; 0 where a row has fewer than others."""
    counts = np.array([len(row) for row in blocks])
    table = np.zeros((len(blocks), counts.max()), dtype=np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = np.fromiter(chain.from_iterable(blocks), dtype=np.int32)
    return table


def _places(blocks: Rows[list[int]], lengths: Rows[int], block: int) -> tuple[np.ndarray, np.ndarray]:
    """The slots of the first tokens of each row, so many as `lengths` says, and their positions; row after row."""
    flat = np.fromiter(chain.from_iterable(blocks), dtype=np.int64)
    before = np.cumsum([0, *(len(row) for row in blocks[:-1])])
    starts = np.cumsum([0, *lengths[:-1]])
    positions = np.arange(sum(lengths)) - np.repeat(starts, lengths)
    return flat[np.repeat(before, lengths) + positions // block] * block + positions % block, positions
