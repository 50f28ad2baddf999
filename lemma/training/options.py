"""What a recipe can say about training: the run, the optimiser, batches, checkpoints and the supervised stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from lemma.config import Options
from lemma.data.options import DataOptions, ValidationOptions
from lemma.evaluation.options import EvalOptions

Share = Annotated[float, Field(ge=0, lt=1)]


# Of a file or folder, on every file system in use, with room for what is written beside it.
LONGEST_NAME = 200


class RunOptions(Options):
    """Where a run lives and what makes it repeatable."""

    dir: str = Field("runs/run", min_length=1)
    """Folder of everything the run writes: recipe, log, metrics, checkpoints, models."""
    seed: int = Field(0, ge=0)
    """Seed of every named random stream."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads. Recorded at the first start and kept when the run goes on, because results depend on it."""
    deterministic: bool = False
    """On a GPU: bit-equal results at some cost in speed. A CPU run is always bit-equal."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: str | None = None
    """Name of a Weights & Biases project to log to; honours WANDB_MODE=offline."""

    @field_validator("dir")
    @classmethod
    def _is_a_path(cls, path: str) -> str:
        """`~` is the home folder, as in a shell."""
        if "\0" in path:
            raise ValueError("a path cannot hold a character of value 0")
        if any(len(part.encode()) > LONGEST_NAME for part in Path(path).parts):
            raise ValueError(f"a folder's name has at most {LONGEST_NAME} bytes")
        return str(Path(path).expanduser()) if path.startswith("~") else path


class OptimOptions(Options):
    """AdamW and its schedule."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit holds the moments in 8 bits (bitsandbytes)."""
    lr: float = Field(1e-5, ge=0)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup: float = Field(0.0, ge=0)
    """Warm-up: below 1 a share of all steps, otherwise a number of steps."""
    final_lr: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine schedules end, as a share of lr."""
    clip: float = Field(1.0, ge=0)
    """Largest norm of the gradient; 0 turns clipping off."""

    @model_validator(mode="after")
    def _whole_warmup(self) -> OptimOptions:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ValueError("warmup is a share below 1 or a whole number of steps; write for example 0.1 or 30")
        return self


class BudgetOptions(Options):
    """How much is computed at a time."""

    token_budget: int = Field(16384, ge=16)
    """Most tokens in one forward and backward pass. Changes speed and memory, never the gradient."""


class BatchOptions(BudgetOptions):
    """How much goes into one optimisation step, and how much of it is computed at a time."""

    sequences: int = Field(32, ge=1)
    """Sequences per optimisation step, over all ranks."""


class CheckpointOptions(Options):
    """When the whole state is saved, and what is kept."""

    every: int = Field(100, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = Field(2, ge=1)
    """How many of the newest are kept, the best one aside."""


class StageOptions(Options):
    """What every kind of stage has."""

    kind: str
    """supervised."""
    start_from: str | None = None
    """Name of an earlier stage whose final model this one starts from. Default: the stage before, or the recipe's model
    for the first one."""
    optim: OptimOptions = OptimOptions()
    """The optimiser."""
    batch: BudgetOptions = BudgetOptions()
    """Batch sizes."""
    checkpoint: CheckpointOptions = CheckpointOptions()
    """Checkpoints."""
    eval: EvalOptions = EvalOptions()
    """Benchmarks before, during and after the stage."""
    log_every: int = Field(1, ge=1)
    """Steps between rows of metrics."""


def stage_before(stages: Mapping[str, StageOptions], name: str) -> str | None:
    """The stage whose model stage `name` starts from; None where that is the recipe's model."""
    names = list(stages)
    earlier = names[: names.index(name)]
    return stages[name].start_from or (earlier[-1] if earlier else None)


class SupervisedOptions(StageOptions):
    """Imitate worked solutions: cross-entropy on the response, the end-of-sequence token included."""

    kind: Literal["supervised"] = "supervised"
    """Supervised fine-tuning."""
    batch: BatchOptions = BatchOptions()
    """Batch sizes."""
    data: DataOptions = DataOptions()
    """Where the demonstrations come from."""
    validation: ValidationOptions = ValidationOptions()
    """Held-out demonstrations and how often their loss is computed."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the data. Give this or steps; default one epoch."""
    steps: int | None = Field(None, ge=1)
    """Optimisation steps."""
    unique_examples: Annotated[int, Field(ge=1)] | Literal["all"] = "all"
    """Use the first N demonstrations only."""
    packing: Literal["borders", "stream"] = "borders"
    """borders: sequences side by side, attention never crosses. stream: documents run on and are cut every
    max_length tokens, as in classic instruction tuning."""
    max_length: int | None = Field(None, ge=8)
    """Longest sequence; longer ones are dropped and counted. Default: the model's context."""
    train_on: Literal["response", "all"] = "response"
    """Tokens that are learnt: the response only, or the prompt as well."""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """The loss is a sum over tokens divided by: all trained tokens; each sequence's own length and the number of
    sequences; or `constant` times the number of sequences."""
    constant: float = Field(1.0, gt=0)
    """Divisor of `normalise: constant`."""
    shuffle: bool = True
    """A new order for every epoch, from the run's seed."""

    @model_validator(mode="after")
    def _one_length(self) -> SupervisedOptions:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        if self.packing == "stream" and self.max_length is None:
            raise ValueError("`packing: stream` cuts every max_length tokens; add `max_length: 512` to the stage")
        return self
