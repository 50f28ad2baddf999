"""What a recipe can say about vLLM. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lemma.config import Options

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads in vLLM's CPU kernels."""


class VllmOptions(Options):
    """vLLM as the engine: in the trainer's process, or as a supervised server on this machine."""

    mode: Literal["process", "server"] = "process"
    """`process` shares the trainer's process and device; `server` is a process of its own."""
    servers: Annotated[int, Field(ge=1, le=1024)] | list[str] = 1
    """How many servers Lemma starts, or the addresses of running servers, such as [http://node7:8000]. Addresses, or
    more than one server, imply `mode: server`. Requests are balanced across the servers, and each gets the weights."""
    gpus: list[Annotated[int, Field(ge=0)]] | None = None
    """GPUs for the servers that Lemma starts, one each. Default: those after the ranks' GPUs; for a single server the
    trainer's."""
    context: int | None = Field(None, ge=2)
    """Maximum length of prompt and completion together. Default: the model's own limit."""
    memory: float = Field(0.4, gt=0, lt=1)
    """Share of the GPU's memory that vLLM may use, weights and cache together."""
    cache_gib: float | None = Field(None, gt=0)
    """Size of the key-value cache in GiB, instead of `memory`. Default on a CPU: 1."""
    sequences: int = Field(256, ge=1)
    """Maximum number of sequences generated at the same time."""
    eager: bool = False
    """Eager mode: starts faster and runs slower, without compilation and CUDA graphs. Always on for a CPU."""
    sleep: bool = False
    """Let the engine release its memory between steps, if the platform supports it."""
    start_seconds: float = Field(600.0, gt=0)
    """Time limit for the start."""
    answer_seconds: float = Field(1800.0, gt=0)
    """Maximum time without any completion while some are pending."""
    restarts: int = Field(3, ge=0)
    """How many times in a row, without a single completion in between, a server that dies is restarted."""

    @model_validator(mode="after")
    def _has_servers(self) -> VllmOptions:
        if isinstance(self.servers, list):
            wrong = [url for url in self.servers if not url.startswith(("http://", "https://"))]
            if wrong or not self.servers:
                raise ValueError(f"servers are addresses such as http://node7:8000, not {wrong or 'an empty list'}")
            if len(set(self.servers)) < len(self.servers):
                raise ValueError("every server is named once")
        elif self.gpus is not None and len(self.gpus) != self.servers:
            raise ValueError(f"gpus has {len(self.gpus)} numbers for {self.servers} servers; write one for each")
        return self

    @property
    def has_own_devices(self) -> bool:
        """Whether vLLM runs outside the trainer's process."""
        return self.mode == "server" or self.servers != 1


def head_refusal(size: int) -> str | None:
    """Why vLLM cannot run attention heads of this size on a CPU, if it cannot."""
    if size in CPU_HEADS:
        return None
    return f"vLLM cannot run attention heads of size {size} on a CPU (only {', '.join(map(str, CPU_HEADS))})"
