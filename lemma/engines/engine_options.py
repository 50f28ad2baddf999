"""What a recipe can say about engines. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lemma.config import Options
from lemma.engines.vllm.vllm_options import VllmOptions


class EngineOptions(Options):
    """Which engine generates."""

    name: str = ""
    """native (the trainer's own modules), vllm, or transformers (slow, for comparison)."""


class NativeOptions(EngineOptions):
    """Lemma's own engine, on the very modules that train."""

    name: Literal["native"] = "native"
    """Lemma's own engine, on the trainer's weights."""
    cache_gib: float | None = Field(None, gt=0)
    """Memory of the key-value cache in GiB. Default: half of what is free on the GPU, or 65536 tokens on a CPU."""
    cache_tokens: int | None = Field(None, ge=1)
    """Size of the cache in tokens, in place of `cache_gib`."""
    sequences: int = Field(1024, ge=1, le=1024)
    """Maximum number of sequences that are generated at the same time."""
    prefill_tokens: int | None = Field(None, ge=1)
    """Maximum number of prompt tokens in one pass; longer prompts are computed in pieces. Default: at most 16384,
    fewer for wide models, so that they need less than 0.8 GiB in addition to the cache."""
    share_prefixes: bool = True
    """Use what is cached of the beginning of a prompt again, as in the next turn of a conversation."""
    graphs: bool = True
    """Decode through CUDA graphs on a GPU."""
    burst: int | None = Field(None, ge=1, le=16)
    """Decoding steps between two looks at the tokens. Default: 16 on a GPU, 4 on a CPU."""


class TransformersOptions(EngineOptions):
    """Transformers' own cache and masks, step by step: slow, and it serves every causal language model."""

    name: Literal["transformers"] = "transformers"
    """The `generate` function of transformers."""
    batch: int = Field(64, ge=1)
    """Sequences that run together."""


class VllmEngineOptions(VllmOptions, EngineOptions):
    """vLLM as the engine: in the trainer's process, or as a supervised server on this machine."""

    name: Literal["vllm"] = "vllm"
    """vLLM, in this process or as a server."""


ENGINES: dict[str, type[EngineOptions]] = {
    "native": NativeOptions,
    "vllm": VllmEngineOptions,
    "transformers": TransformersOptions,
}
