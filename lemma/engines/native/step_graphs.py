"""Decoding steps as CUDA graphs: recorded once for each way of sampling and size of a batch, then replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lemma.engines.native.sampler import SamplingMode

if TYPE_CHECKING:
    from lemma.engines.native.runner import Batch


class NotCaptured(RuntimeError):
    """A step cannot be captured: some layers have sizes that depend on data on the device (a mixture's experts in
    float32)."""


class StepGraphs:
    """Replays `compute`, which a batch is given to in place. Graphs that sample by themselves keep no logits, so that
    all graphs can share the memory for them."""

    def __init__(self, compute: Callable[[Batch, SamplingMode], torch.Tensor]):
        self.captures = 0
        self._compute = compute
        self._nothing = torch.empty(0)
        self.drop()

    def drop(self) -> None:
        self._graphs: dict[tuple[SamplingMode, int], Any] = {}
        self._logits: dict[tuple[SamplingMode, int], torch.Tensor] = {}
        self._pool: Any = None

    def replay(self, batch: Batch, mode: SamplingMode) -> torch.Tensor:
        """One token for every row. Returns the logits (B, V) where the host samples."""
        name = mode, len(batch.ids_B)
        if name not in self._graphs:
            before = [x.clone() for x in (batch.ids_B, batch.positions_B, batch.step)]
            try:
                self._capture(name, batch, before)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.drop()
                _restore(batch, before)
                raise NotCaptured((str(error).strip().splitlines() or [""])[0]) from error
        self._graphs[name].replay()
        return self._logits.get(name, self._nothing)

    def _capture(self, name: tuple[SamplingMode, int], batch: Batch, before: list[torch.Tensor]) -> None:
        """Record a step as a graph. The warm-up runs advance the batch, so it is restored afterwards."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._compute(batch, name[0])
                _restore(batch, before)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads do not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_BV = self._compute(batch, name[0])
        if name[0] == "host":
            self._logits[name] = logits_BV
        self._pool = self._pool or graph.pool()
        self._graphs[name] = graph
        self.captures += 1
        _restore(batch, before)


def _restore(batch: Batch, before: list[torch.Tensor]) -> None:
    for tensor, value in zip((batch.ids_B, batch.positions_B, batch.step), before, strict=True):
        tensor.copy_(value)
