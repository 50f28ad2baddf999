"""What a recipe can say about engines. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lemma.config import Options
from lemma.engines.remote.server_options import ServerOptions
from lemma.engines.vllm.vllm_options import VllmOptions


class EngineOptions(Options):
    """Which engine generates."""

    name: str = ""
    """native (the trainer's own modules), vllm, or transformers (slow, for comparison)."""
    start: ClassVar[str] = "preparing the engine"
    """What is waited for while it starts."""

    @property
    def has_own_devices(self) -> bool:
        """Whether it generates in processes of its own."""
        return False


class NativeOptions(ServerOptions, EngineOptions):
    """Lemma's own engine, on the same modules that are trained, or on generation servers."""

    name: Literal["native"] = "native"
    """Lemma's own engine, on the trainer's weights."""
    cache_gib: float | None = Field(None, gt=0)
    """Size of the key-value cache in GiB. Default: half of the GPU's free memory, or 65536 tokens on a CPU."""
    cache_tokens: int | None = Field(None, ge=1)
    """Size of the key-value cache in tokens, instead of `cache_gib`."""
    sequences: int = Field(1024, ge=1, le=1024)
    """Maximum number of sequences generated at the same time."""
    prefill_tokens: int | None = Field(None, ge=1)
    """Maximum number of prompt tokens in one pass; longer prompts are computed in chunks. Default: at most 16384, fewer
    for wide models, so that a pass needs less than 0.8 GiB on top of the cache."""
    share_prefixes: bool = True
    """Prefix caching: reuse cached keys and values of the beginning of a prompt, as in the next turn of a
    conversation."""
    graphs: bool = True
    """Decode with CUDA graphs on a GPU."""
    burst: int | None = Field(None, ge=1, le=16)
    """Decoding steps between checks for finished sequences. Default: 16 on a GPU, 4 on a CPU."""


class TransformersOptions(EngineOptions):
    """Generation with transformers' own cache and masks, step by step: slow, but it works with every causal language
    model."""

    name: Literal["transformers"] = "transformers"
    """The `generate` function of transformers."""
    batch: int = Field(64, ge=1)
    """Sequences generated together."""


class VllmEngineOptions(VllmOptions, EngineOptions):
    """vLLM as the engine: in the trainer's process, or as a supervised server on this machine."""

    name: Literal["vllm"] = "vllm"
    """vLLM, in this process or as a server."""
    start: ClassVar[str] = "starting vLLM"


ENGINES: dict[str, type[EngineOptions]] = {
    "native": NativeOptions,
    "vllm": VllmEngineOptions,
    "transformers": TransformersOptions,
}
