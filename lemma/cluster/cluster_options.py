"""What a recipe can say about several processes and machines. Imports no torch: validating a recipe stays fast."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lemma.config import Options


class ClusterOptions(Options):
    """How many ranks (processes, one for each GPU) share a run, and what each of them holds."""

    ranks: int | None = Field(None, ge=1, le=65536)
    """Number of ranks. Default: one for each GPU of this machine, one on a CPU. torchrun, `accelerate launch`, Slurm
    and Ray set it themselves."""
    speakers: int = Field(0, ge=0, le=65535)
    """How many of the ranks, the last ones, only generate for reinforcement stages: with the native engine, on weights
    that they are sent after every step."""
    shard: Literal["auto", "none", "optimiser", "gradients", "weights"] = "auto"
    """What is split over the ranks: nothing, the optimiser's state (as ZeRO-1), gradients too (ZeRO-2), or the weights
    as well (ZeRO-3, FSDP2), which leaves generation to vLLM servers or speakers. auto: the first that fits by the
    memory plan."""
    slots: int | None = Field(None, ge=1, le=65536)
    """Parts of a step that are dealt out to the ranks. Recorded at the first start and kept: any number of ranks that
    divides it gives the same numbers."""
    restarts: int = Field(3, ge=0)
    """How often in a row the ranks are started again after one of them died, without a step in between."""
    patience: float = Field(30.0, gt=0)
    """Seconds without a sign of life after which a rank counts as dead."""
    deadline: float = Field(3600.0, gt=0)
    """Seconds for which ranks wait for one that lives and does not come, such as one that still generates."""
    config: str | None = Field(None, min_length=1)
    """A DeepSpeed, Accelerate or FSDP configuration file. What it says takes effect wherever the recipe says nothing;
    `lemma plan` names what has no counterpart."""

    @model_validator(mode="after")
    def _somebody_learns(self) -> ClusterOptions:
        if self.ranks is not None and self.speakers >= self.ranks:
            raise ValueError(
                f"speakers is {self.speakers}, and of {self.ranks} ranks none is left to learn; write "
                f"`ranks: {self.speakers + 1}` or more"
            )
        return self
