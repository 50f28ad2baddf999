"""What a recipe can say about vLLM. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lemma.engines.remote.server_options import ServerOptions

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads in vLLM's CPU kernels."""


class VllmOptions(ServerOptions):
    """vLLM as the engine: in the trainer's process, or as a supervised server on this machine."""

    mode: Literal["process", "server"] = "process"
    """`process` shares the trainer's process and device; `server` is a process of its own."""
    servers: Annotated[int, Field(ge=1, le=1024)] | list[str] = 1
    """How many servers Lemma starts, or the addresses of running servers, such as [http://node7:8000]. Addresses, or
    more than one server, imply `mode: server`. Requests are balanced across the servers, and each gets the weights."""
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

    @property
    def has_own_devices(self) -> bool:
        """Whether vLLM runs outside the trainer's process."""
        return self.mode == "server" or self.servers != 1


def head_refusal(size: int) -> str | None:
    """Why vLLM cannot run attention heads of this size on a CPU, if it cannot."""
    if size in CPU_HEADS:
        return None
    return f"vLLM cannot run attention heads of size {size} on a CPU (only {', '.join(map(str, CPU_HEADS))})"
