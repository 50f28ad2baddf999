"""What a recipe can say about an optimisation step: the optimiser, how much is computed at a time, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lemma.config import Options

Share = Annotated[float, Field(ge=0, lt=1)]
# AdamW moves every weight by about the learning rate in a step, and hardly any weight of a model is above 1.
LARGEST_RATE = 1.0


def check_rate(name: str, rate: float) -> None:
    """Refuse a learning rate that cannot be meant."""
    if rate > LARGEST_RATE:
        digits, _, exponent = f"{rate:e}".partition("e")
        meant = f"{float(digits):g}e-{max(4, abs(int(exponent)))}" if int(exponent) < 10 else "1e-5"
        raise ValueError(
            f"{name} is {rate:g}, and AdamW moves every weight by about that much in each step, where hardly any "
            f"weight is above 1; write for example {meant}"
        )


# Bytes that each optimiser keeps beside a weight and its gradient.
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.03, "rmsprop": 4.0}


class OptimOptions(Options):
    """The optimiser and its schedule."""

    name: Literal["adamw", "adamw_8bit", "rmsprop"] = "adamw"
    """adamw_8bit keeps the moments in 8 bits (bitsandbytes); rmsprop is torch's, with a second moment only."""
    lr: float = Field(1e-5, ge=0)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of the two moments of AdamW."""
    smoothing: Share = 0.99
    """Decay rate of the second moment of RMSprop, which torch calls alpha."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only; with rmsprop, as in torch, it is added to the gradient."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup: float = Field(0.0, ge=0)
    """Warm-up: below 1 a share of all steps, otherwise a number of steps."""
    final_lr: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of linear and cosine schedules, as a share of lr."""
    clip: float = Field(1.0, ge=0)
    """Maximum gradient norm; 0 turns clipping off."""

    @model_validator(mode="after")
    def _sensible(self) -> OptimOptions:
        check_rate("lr", self.lr)
        if self.name == "rmsprop" and "betas" in self.model_fields_set and self.betas != (0.9, 0.95):
            raise ValueError("rmsprop has no betas; write `smoothing: 0.99`, or remove betas")
        if self.name != "rmsprop" and self.smoothing != 0.99:
            raise ValueError(f"{self.name} has no smoothing; write betas, or `name: rmsprop`")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ValueError("warmup is a share below 1 or a whole number of steps; write for example 0.1 or 30")
        return self


# Tokens in one pass where nothing else is said.
USUAL_BUDGET = 16384


class BudgetOptions(Options):
    """How much is computed at a time."""

    token_budget: int | None = Field(None, ge=16)
    """Maximum number of tokens in one forward and backward pass. Changes speed and memory, never the gradient. Default:
    on a CPU 16384, or fewer if the memory plan has no room for them; on a GPU as many as it has room for, between 8192
    and 65536."""

    @property
    def planned_budget(self) -> int:
        """The budget by which a plan reckons where the device is not known."""
        return USUAL_BUDGET if self.token_budget is None else self.token_budget


class BatchOptions(BudgetOptions):
    """How much goes into one optimisation step, and how much of it is computed at a time."""

    sequences: int = Field(32, ge=1)
    """Sequences per optimisation step, over all ranks."""


class CheckpointOptions(Options):
    """When the whole state is saved, and which checkpoints are kept."""

    every: int = Field(100, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = Field(2, ge=1)
    """How many of the newest to keep, in addition to the best."""
