"""What runs inside vLLM: Lemma's cuts of the support with the mass they keep, and weight updates in place.

vLLM imports this module by name, in its own process if it has one. `CutLogits` is a logits processor; `Extension` adds
methods to the worker, which are called by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MinTokensLogitsProcessor,
    MoveDirectionality,
)

from lemma.engines.protocol import Sampling
from lemma.engines.sampling import cut, penalise
from lemma.engines.vllm.jobs import ARGUMENT, job_name

# Log of the kept mass by job and position, until it is fetched; of cancelled jobs it is evicted later.
KEPT: dict[str, dict[int, torch.Tensor]] = {}
# The jobs that have begun since the last change of the weights, those before it that still run included.
BEGUN: dict[str, None] = {}
REMEMBERED = 100_000


@dataclass(slots=True)
class _Row:
    name: str
    sampling: Sampling
    ends: tuple[int, ...]
    prompt: list[int]
    output: list[int]  # vLLM's own list: it grows

    @property
    def forbidden(self) -> tuple[int, ...]:
        return self.ends if len(self.output) < self.sampling.min_tokens else ()


def parse(text: str) -> tuple[str, tuple[Sampling, tuple[int, ...]] | None]:
    """What `lemma.engines.vllm.jobs.extra_of` wrote: a job's name, and its cuts if it has any."""
    values = json.loads(text)
    if "sampling" not in values:
        return values["name"], None
    return values["name"], (Sampling(max_tokens=1, **values["sampling"]), tuple(values["ends"]))


def _forget(entries: dict[str, Any]) -> None:
    """Drop the oldest beyond what is remembered."""
    while len(entries) > REMEMBERED:
        del entries[next(iter(entries))]


class CutLogits(LogitsProcessor):
    """Repetition penalty, ends before `min_tokens`, top-k, top-p and min-p, as in every engine of Lemma.

    `Extension.lemma_prepare` puts it first, so it sees the model's raw logits. vLLM applies the temperature.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._rows.pop(index, None)
            text = (params.extra_args or {}).get(ARGUMENT)
            if text is None:
                continue
            name, cuts = parse(text)
            BEGUN[name] = None
            if cuts is not None:
                self._rows[index] = _Row(name, *cuts, prompt or [], output)
        _forget(BEGUN)
        for one, other, direction in batch_update.moved:
            row, replaced = self._rows.pop(one, None), self._rows.pop(other, None)
            if row is not None:
                self._rows[other] = row
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._rows[one] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        groups: dict[tuple[Sampling, tuple[int, ...]], list[int]] = {}
        for index, row in self._rows.items():
            if index < len(logits):
                groups.setdefault((row.sampling, row.forbidden), []).append(index)
        for (sampling, forbidden), members in groups.items():
            part = logits[members]
            if sampling.repetition_penalty != 1.0:
                part = torch.stack([self._penalised(part[i], self._rows[index]) for i, index in enumerate(members)])
            masked, kept = cut(part, sampling, forbidden)
            logits[members] = part.masked_fill(masked.isneginf(), float("-inf"))
            for i, index in enumerate(members):
                row = self._rows[index]
                KEPT.setdefault(row.name, {})[len(row.output)] = kept[i]
        _forget(KEPT)
        return logits

    def _penalised(self, logits_V: torch.Tensor, row: _Row) -> torch.Tensor:
        seen = torch.tensor(sorted({*row.prompt, *row.output} - {-1}), device=logits_V.device)
        return penalise(logits_V, seen, row.sampling.repetition_penalty)


class Extension:
    """Methods of the worker. Arguments and results can be sent by a server."""

    model_runner: Any

    def lemma_prepare(self) -> list[str]:
        """Put Lemma's cuts first and remove vLLM's min-tokens processor, which always forbids the end of sequence."""
        processors = self.model_runner.input_batch.logitsprocs.non_argmax_invariant
        processors[:] = [p for p in processors if not isinstance(p, MinTokensLogitsProcessor)]
        processors.sort(key=lambda processor: not isinstance(processor, CutLogits))
        return [type(processor).__name__ for processor in processors]

    def lemma_clear(self) -> None:
        """Zero the cache: attention reads whole blocks, so a NaN would outlive its sequence."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def lemma_kept(self, name: str, count: str) -> list[float]:
        """The log of the kept mass at the first `count` positions of a request; removes its entry."""
        kept = KEPT.pop(name, {})
        return [float(kept[position]) for position in range(int(count))]

    def lemma_counts(self) -> dict[str, int | None]:
        """The number of tokens of each running job, and None for each that was finished since the last call."""
        running = {job_name(name): len(one.output_token_ids) for name, one in self.model_runner.requests.items()}
        finished = BEGUN.keys() - running.keys()
        for name in finished:
            del BEGUN[name]
        return running | dict.fromkeys(finished)

    def lemma_load(self, folder: str) -> list[str]:
        """Load weights from a folder's safetensors files, one file at a time."""
        return self._reload(item for path in sorted(Path(folder).glob("model*.safetensors"))
                            for item in load_file(path).items())  # fmt: skip

    def lemma_take(self, state: dict[str, torch.Tensor]) -> list[str]:
        """Load weights by their Hugging Face names, in place."""
        return self._reload(iter(state.items()))

    def _reload(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
        names: list[str] = []

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                names.append(name)
                yield name, tensor

        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=noted())
            refresh_head(self.model_runner.get_model())
        return sorted(names)


def refresh_head(model: torch.nn.Module) -> None:
    """On some platforms a head tied to the embedding keeps its own packed copy: pack it again."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if head is not None and method is not None and hasattr(method, "process_weights_after_loading"):
        method.process_weights_after_loading(head)
