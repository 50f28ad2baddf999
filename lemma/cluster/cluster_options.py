"""What a recipe can say about several processes and machines. Imports no torch: validating a recipe stays fast."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lemma.config import Options
from lemma.core.errors import UserError
from lemma.core.ranks import slots_for


class ClusterOptions(Options):
    """How many ranks (processes, one per GPU) share a run, and what each of them holds."""

    ranks: int | None = Field(None, ge=1, le=65536)
    """Number of ranks. Default: one per GPU of this machine; on a CPU, one. torchrun, `accelerate launch`, Slurm and
    Ray set it themselves."""
    speakers: int = Field(0, ge=0, le=65535)
    """How many of the ranks (the last ones) only generate, for reinforcement stages: with the native engine, on weights
    that are sent to them after every step."""
    shard: Literal["auto", "none", "optimiser", "gradients", "weights"] = "auto"
    """What is sharded across the ranks: nothing, the optimiser state (as ZeRO-1), gradients too (ZeRO-2), or the
    weights as well (ZeRO-3, FSDP2), which leaves generation to vLLM servers or speakers. auto: the first of these that
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

    @property
    def learners(self) -> int:
        """The ranks that learn, as far as the recipe tells."""
        return max(1, (self.ranks or 1) - self.speakers)

    def slots_for(self, learners: int) -> int:
        """How many slots a run begins with where so many ranks learn."""
        return self.slots or slots_for(learners, self.speakers)

    def slots_of_one(self, learners: int) -> int:
        """The most of them that one of so many ranks has."""
        return -(-self.slots_for(learners) // learners)

    def check_ranks(self, given: int) -> None:
        """Refuse a number of ranks that leaves nobody to learn."""
        if given <= self.speakers:
            raise UserError(
                f"--ranks {given} leaves nobody to learn next to {self.speakers} speaker{'s' * (self.speakers != 1)}",
                fix=f"write --ranks {self.speakers + 1} or more",
            )

    def check_alone(self) -> None:
        """Refuse speakers where there is one process."""
        if self.speakers:
            raise UserError(
                f"cluster.speakers is {self.speakers}, and there is one process",
                fix=f"start {self.speakers + 1} ranks or more, or write `speakers: 0`",
            )

    @model_validator(mode="after")
    def _somebody_learns(self) -> ClusterOptions:
        if self.ranks is not None and self.speakers >= self.ranks:
            raise ValueError(
                f"speakers is {self.speakers}, and of {self.ranks} ranks none is left to learn; write "
                f"`ranks: {self.speakers + 1}` or more"
            )
        return self
