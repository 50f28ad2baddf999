"""Forward passes of the engine on the policy's own modules: prefill, and bursts of decoding steps.

A burst is several decoding steps without a host round trip: each step's tokens are the next step's input. On a GPU a
step is one CUDA graph, captured for a ladder of batch sizes, and a launch does not wait for the previous burst.
Shapes: B rows, M blocks of the longest row, K steps of a burst.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from lemma.core.errors import warn
from lemma.engines.native.cached_attention import Cache, DecodeContext, PrefillContext
from lemma.engines.native.cuts import Cuts
from lemma.engines.native.noise import halves
from lemma.engines.native.sampler import SamplingMode, draw, draw_cut, sampling_mode, temperatures
from lemma.engines.native.sequences import Sequence
from lemma.engines.native.step_graphs import NotCaptured, StepGraphs
from lemma.models.adapters import fold_adapters
from lemma.models.packing import Segments, copy_together
from lemma.models.policy import Policy

LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
BURST = 16


@dataclass
class Batch:
    """The tensors of a decoding step. Captured graphs hold their addresses, so they are filled in place."""

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
        """The first rows of the same tensors, but all of the cuts: few modes read them."""
        return Batch(
            self.ids_B[:rows],
            self.positions_B[:rows],
            self.table_BM[:rows],
            self.keys_B2[:rows],
            self.inverse_B[:rows],
            self.noisy_B[:rows],
            self.cuts,
            self.step,
            self.tokens_KB[:, :rows],
            self.logprobs_KB[:, :rows],
            self.kept_KB[:, :rows],
        )


@dataclass
class Burst:
    """Decoding steps that have been launched. `done` is recorded right after them and does not wait for later launches.
    First tokens also stay on the device, in `first_B`, so that the next step can use them before the host does."""

    sequences: list[Sequence]
    steps: int
    mode: SamplingMode
    tokens_KB: torch.Tensor
    logprobs_KB: torch.Tensor
    kept_KB: torch.Tensor
    done: torch.cuda.Event | None
    first_B: torch.Tensor | None = None


class Runner:
    """Runs the model; knows nothing of queues. Padding rows write to block 0, which no sequence owns."""

    def __init__(self, policy: Policy, cache: Cache, max_rows: int, context: int, use_graphs: bool, fused: bool):
        self.policy = policy
        self.cache = cache
        self.fused = fused
        self.use_graphs = use_graphs
        self._on_gpu = policy.device.type == "cuda"
        if fused:
            fold_adapters(policy.module)
        blocks = -(-(context + BURST) // cache.block)
        self.buffers = Batch.empty(max_rows, blocks, policy.device)
        self.graphs = StepGraphs(self._compute)
        self._cuts: bool | None = None
        # The run ids of the sequences whose state is in the buffers, and how many blocks of each are in the table.
        self._rows: list[int] = []
        self._widths: list[int] = []

    def has_cut_kernels(self) -> bool:
        """Whether kernels can cut the support (top-k, top-p, min-p, forbidden ends) here; tried once."""
        if self._cuts is None and self.fused:
            from lemma.engines.native.kernel_trial import kernels_cut

            self._cuts = kernels_cut(self.policy.device, self.policy.dtype, self.policy.logit_map)
        return bool(self._cuts)

    # --- prompts -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, parts: Rows[tuple[Sequence, int]]) -> torch.Tensor:
        """Write the next tokens of some sequences to the cache; logits (B, V) after the last token of each."""
        device = self.policy.device
        new = [count for _, count in parts]
        total = [sequence.cached + count for sequence, count in parts]
        ids_T = np.concatenate([s.tokens[s.cached : s.cached + count] for s, count in parts])
        places, positions = _slots([s.blocks for s, _ in parts], total, self.cache.block)
        arrays = [ids_T.astype(np.int64, copy=False), places, positions, np.cumsum(new) - 1]
        if new != total:
            is_new = positions >= np.repeat([s.cached for s, _ in parts], total)
            arrays[1:3] = [places[is_new], positions[is_new]]
            arrays.append(places)
        ids_T, slots_T, positions_T, last_B, *sources = copy_together(arrays, self.policy.device)
        segments = Segments(tuple(new), device)
        context = PrefillContext(
            self.cache,
            slots_T,
            segments,
            Segments(tuple(total), device) if sources else segments,
            sources[0] if sources else None,
            self.fused,
        )
        return self._head(self.policy.hidden_cached(ids_T, positions_T, context)[last_B])

    @torch.no_grad()
    def sample_first(self, logits_BV: torch.Tensor, rows: list[int], sequences: list[Sequence], eos: int) -> Burst:
        """Start sampling the first tokens after prompts; `rows` is the row of logits for each sequence."""
        mode, logit_map = sampling_mode(sequences, self.has_cut_kernels, eos), self.policy.logit_map
        keys, lengths = halves([s.noise_key for s in sequences]), np.array([s.length for s in sequences])
        arrays = [np.array(rows), keys, lengths, *temperatures(sequences)]
        if mode == "cut":
            arrays += [part.numpy() for part in Cuts.of(sequences, eos)]
        rows_B, keys_B2, positions_B, inverse, noisy, *cuts = copy_together(arrays, self.policy.device)
        if rows != list(range(len(logits_BV))):
            logits_BV = logits_BV[rows_B]
        if mode == "host":
            drawn = draw_cut(logits_BV, sequences, keys_B2, positions_B, 0, eos, logit_map)
        else:
            limits = Cuts(*cuts) if cuts else None
            drawn = draw(logits_BV, keys_B2, positions_B, inverse, noisy, self.fused, logit_map, limits)
        burst = self._begin_readback(sequences, 1, mode, *(part[None] for part in drawn))
        burst.first_B = drawn[0]
        return burst

    # --- bursts ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(
        self, sequences: list[Sequence], steps: int, mode: SamplingMode, eos: int, first_tokens: Collection[Burst] = ()
    ) -> Burst:
        """Start sampling `steps` more tokens of each sequence. `first_tokens` are those that the host has not read."""
        rows = len(sequences)
        size = next(s for s in LADDER if s >= rows) if self.use_graphs else rows
        batch = self.buffers.first(size)
        self._fill(batch, sequences, mode, eos, first_tokens)
        for number in range(steps):
            logits_BV = self._step(batch, mode) if self.use_graphs else self._compute(batch, mode)
            if mode == "host":
                keys, positions = batch.keys_B2[:rows], batch.positions_B[:rows] + 1
                drawn = draw_cut(logits_BV[:rows], sequences, keys, positions, number, eos, self.policy.logit_map)
                for kept_there, values in zip((batch.tokens_KB, batch.logprobs_KB, batch.kept_KB), drawn, strict=True):
                    kept_there[number, :rows] = values
                batch.ids_B[:rows] = drawn[0]
                batch.positions_B.add_(1)
        results = (batch.tokens_KB, batch.logprobs_KB, batch.kept_KB)
        return self._begin_readback(sequences, steps, mode, *(part[:steps, :rows] for part in results))

    def _begin_readback(
        self,
        sequences: list[Sequence],
        steps: int,
        mode: SamplingMode,
        tokens_KB: torch.Tensor,
        logprobs_KB: torch.Tensor,
        kept_KB: torch.Tensor,
    ) -> Burst:
        """Start copying results to the host."""
        if not self._on_gpu:
            return Burst(sequences, steps, mode, tokens_KB.clone(), logprobs_KB.clone(), kept_KB.clone(), None)
        # On the host, where the next burst does not overwrite it; valid once the device has reached the copy.
        tokens_KB, logprobs_KB, kept_KB = (
            torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
            for part in (tokens_KB, logprobs_KB, kept_KB)
        )
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.policy.device))
        return Burst(sequences, steps, mode, tokens_KB, logprobs_KB, kept_KB, done)

    def _fill(
        self, batch: Batch, sequences: Rows[Sequence], mode: SamplingMode, eos: int, first_tokens: Collection[Burst]
    ) -> None:
        """Bring the batch up to date. Rows of the last burst on the device continue from their state there, which may
        be ahead of what the host has read; only newly allocated blocks are copied."""
        names = [s.run_id for s in sequences] if mode != "host" else []
        row_of = {name: row for row, name in enumerate(self._rows)}
        if mode != "host" and all(name in row_of for name in names):
            if names != self._rows:
                self._compact(batch, [row_of[name] for name in names], mode)
            if changed := [i for i, s in enumerate(sequences) if len(s.blocks) != self._widths[i]]:
                table = _table([sequences[i].blocks for i in changed])
                rows, blocks = copy_together([np.array(changed), table], self.policy.device)
                batch.table_BM[rows, : table.shape[1]] = blocks
            batch.step.zero_()
            batch.positions_B[len(sequences) :] = 0
        else:
            self._fill_all(batch, sequences, mode, eos, first_tokens)
        self._rows, self._widths = names, [len(s.blocks) for s in sequences]

    def _compact(self, batch: Batch, stay: list[int], mode: SamplingMode) -> None:
        """Move the rows that stay to the front, and clear the block tables of the others."""
        (rows,), old = copy_together([np.array(stay)], self.policy.device), self.buffers
        kept = [old.ids_B, old.positions_B, old.table_BM, old.keys_B2, old.inverse_B, old.noisy_B]
        for tensor in (*kept, *(old.cuts if mode == "cut" else ())):
            tensor[: len(stay)] = tensor[rows]
        batch.table_BM[len(stay) :] = 0
        self._widths = [self._widths[row] for row in stay]

    def _fill_all(
        self, batch: Batch, sequences: Rows[Sequence], mode: SamplingMode, eos: int, first_tokens: Collection[Burst]
    ) -> None:
        """Fill all state of these rows. Cuts only if the mode reads them: rows that need none never will."""
        first = {s.run_id: place for place, s in enumerate(s for burst in first_tokens for s in burst.sequences)}
        assert all(s.cached == s.length - (s.run_id not in first) for s in sequences), "a burst of these is not read"
        unread = [row for row, s in enumerate(sequences) if s.run_id in first]
        rows, size = len(sequences), len(batch.ids_B)
        numbers = np.zeros((2, size), dtype=np.int64)
        numbers[0, :rows] = [0 if s.run_id in first else s.newest[-1] for s in sequences]
        numbers[1, :rows] = [s.cached for s in sequences]
        reals = np.ones((2, size), dtype=np.float32)
        reals[:, :rows] = temperatures(sequences)
        table = _table([*(s.blocks for s in sequences), *([[]] * (size - rows))])
        arrays = [*numbers, table, halves([s.noise_key for s in sequences]), *reals]
        targets = [batch.ids_B, batch.positions_B, batch.table_BM[:, : table.shape[1]], batch.keys_B2[:rows]]
        targets += [batch.inverse_B, batch.noisy_B]
        if mode == "cut":
            arrays += [part.numpy() for part in Cuts.of(sequences, eos)]
            targets += batch.cuts.first(rows)
        places = [first[sequences[row].run_id] for row in unread]
        arrays += [np.array(unread, dtype=np.int64), np.array(places, dtype=np.int64)]
        *values, into, taken = copy_together(arrays, self.policy.device)
        for there, value in zip(targets, values, strict=True):
            there.copy_(value)
        if unread:
            batch.ids_B[into] = torch.cat([burst.first_B for burst in first_tokens])[taken]
        batch.step.zero_()

    def _step(self, batch: Batch, mode: SamplingMode) -> torch.Tensor:
        """One token for every row, through a graph as long as steps can be captured."""
        try:
            return self.graphs.replay(batch, mode)
        except NotCaptured as error:
            kind = type(self.policy.causal).__name__
            warn(f"{kind} cannot be decoded through CUDA graphs ({error}); the engine does without, and is slower")
            self.use_graphs = False
            return self._compute(batch, mode)

    def _compute(self, batch: Batch, mode: SamplingMode) -> torch.Tensor:
        block = self.cache.block
        positions = batch.positions_B
        blocks = batch.table_BM.gather(1, (positions // block)[:, None])[:, 0].long()
        context = DecodeContext(
            self.cache, batch.table_BM, positions + 1, blocks * block + positions % block, self.fused
        )
        logits_BV = self._head(self.policy.hidden_cached(batch.ids_B, positions, context))
        if mode != "host":
            settings = (batch.inverse_B, batch.noisy_B, self.fused, self.policy.logit_map)
            cuts = batch.cuts.first(len(batch.ids_B)) if mode == "cut" else None
            tokens, logprobs, kept = draw(logits_BV, batch.keys_B2, positions + 1, *settings, cuts)
            batch.tokens_KB.index_copy_(0, batch.step, tokens[None])
            batch.logprobs_KB.index_copy_(0, batch.step, logprobs.float()[None])
            batch.kept_KB.index_copy_(0, batch.step, kept.float()[None])
            batch.ids_B.copy_(tokens)
            batch.positions_B.add_(1)
            batch.step.add_(1)
        return logits_BV

    # --- the model ---------------------------------------------------------------------------------------------

    def _head(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """The raw output of the head; the sampler applies the model's scaling and capping (`Policy.logit_map`)."""
        logits = hidden_BH @ self.policy.head.weight.to(hidden_BH.dtype).T
        bias = getattr(self.policy.head, "bias", None)
        return logits if bias is None else logits + bias


def _table(blocks: Rows[list[int]]) -> np.ndarray:
    """The block table: a row of blocks for each sequence, padded with 0."""
    counts = np.array([len(row) for row in blocks])
    table = np.zeros((len(blocks), counts.max()), dtype=np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = np.fromiter(chain.from_iterable(blocks), dtype=np.int32)
    return table


def _slots(blocks: Rows[list[int]], lengths: Rows[int], block: int) -> tuple[np.ndarray, np.ndarray]:
    """The slots and positions of the first `lengths` tokens of each row, concatenated."""
    flat = np.fromiter(chain.from_iterable(blocks), dtype=np.int64)
    before = np.cumsum([0, *(len(row) for row in blocks[:-1])])
    starts = np.cumsum([0, *lengths[:-1]])
    positions = np.arange(sum(lengths)) - np.repeat(starts, lengths)
    return flat[np.repeat(before, lengths) + positions // block] * block + positions % block, positions
