"""What a recipe can say about several processes and machines. Imports no torch: validating a recipe stays fast."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from lemma.config import Options


class ClusterOptions(Options):
    """How many ranks (processes, one per GPU) share a run, and what each of them holds."""

    ranks: int | None = Field(None, ge=1, le=65536)
    """Number of ranks. Default: one per GPU of this machine; on a CPU, one. torchrun, `accelerate launch`, Slurm and
    Ray set it themselves."""
    speakers: int = 0
    """Not used any more: `rollout.engine.servers` of a stage says how many servers generate."""
    shard: Literal["auto", "none", "optimiser", "gradients", "weights"] = "auto"
    """What is sharded across the ranks: nothing, the optimiser state (as ZeRO-1), gradients too (ZeRO-2), or the
    weights as well (ZeRO-3, FSDP2), which leaves generation to servers. auto: the first of these that
    fits according to the memory plan."""
    slots: int | None = Field(None, ge=1, le=65536)
    """How many parts a step is split into; the ranks share them out. Recorded at the first start and kept: any number
    of ranks that divides it gives the same results."""
    restarts: int = Field(3, ge=0)
    """How many times in a row, with no step in between, the ranks are restarted after one of them dies."""
    patience: float = Field(30.0, gt=0)
    """Seconds without a heartbeat after which a rank counts as dead."""
    deadline: float = Field(3600.0, gt=0)
    """Seconds that ranks wait for one that is alive but late, such as one that is still generating."""
    config: str | None = Field(None, min_length=1)
    """A DeepSpeed, Accelerate or FSDP configuration file. Its settings apply wherever the recipe says nothing; `lemma
    plan` names those that have no counterpart."""

    @field_validator("speakers")
    @classmethod
    def _servers_generate(cls, given: int) -> int:
        if given:
            raise ValueError(
                "ranks do not generate for others any more, servers do; write `rollout.engine: {name: native, servers: "
                f"{given}}}` in the stage"
            )
        return given
