"""What a recipe can say about a run, and about any stage of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, field_validator, model_validator

from lemma.config import Options
from lemma.core.errors import UserError, nearest
from lemma.core.ranks import slots_for
from lemma.evaluation.eval_settings import EvalOptions
from lemma.learning.learning_options import MOMENTS, BudgetOptions, CheckpointOptions, OptimOptions
from lemma.models.memory import MemoryPlan, Shape, plan_training
from lemma.models.model_options import ModelOptions, Precision

if TYPE_CHECKING:
    from lemma.cluster.cluster_options import ClusterOptions
    from lemma.formats import Format
    from lemma.runs.stage import Stage


# Longest name of a file or folder on common file systems, with room for suffixes.
LONGEST_NAME = 200
STAGE_NAME = r"[A-Za-z0-9_-]+"
"""The form of the name of a stage, which is that of its folder too."""


class RunOptions(Options):
    """Where a run lives and what makes it reproducible."""

    dir: str = Field("runs/run", min_length=1)
    """Folder of everything the run writes: recipe, log, metrics, checkpoints, models."""
    seed: int = Field(0, ge=0)
    """Seed of all random streams."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto uses a GPU if there is one."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads. Recorded at the first start and reused on resuming, because results depend on it."""
    deterministic: bool = False
    """On a GPU: bit-identical results, at some cost in speed. A CPU run is always bit-identical."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: str | None = None
    """Name of a Weights & Biases project to log to; honours WANDB_MODE=offline."""
    loggers: list[str] = Field(default_factory=list)
    """Further loggers: mlflow, trackio, `path.py:Name` (a class or a function), or names from other packages."""

    @field_validator("dir")
    @classmethod
    def _is_a_path(cls, path: str) -> str:
        """`~` is the home folder, as in a shell."""
        if "\0" in path:
            raise ValueError("a path cannot contain a null character")
        if any(len(part.encode()) > LONGEST_NAME for part in Path(path).parts):
            raise ValueError(f"a folder's name has at most {LONGEST_NAME} bytes")
        return str(Path(path).expanduser()) if path.startswith("~") else path


# In place of a length that a recipe has, `--set` gives another one.
# Far above what anybody trains: a longer stage is a slip of the keyboard.
MOST_STEPS, MOST_EPOCHS = 10**9, 10**6
BOTH_LENGTHS = "give epochs or steps, not both: `epochs: null` or `steps: null` takes one back"


class StageOptions(Options):
    """What every kind of stage has."""

    kind: str
    """What the stage does: supervised, preference or rl."""
    start_from: str | None = None
    """Name of an earlier stage whose final model this one starts from. Default: the previous stage, or the recipe's
    model for the first one."""
    optim: OptimOptions = OptimOptions()
    """The optimiser."""
    batch: BudgetOptions = BudgetOptions()
    """Batch sizes."""
    checkpoint: CheckpointOptions = CheckpointOptions()
    """When checkpoints are saved, and which are kept."""
    eval: EvalOptions = EvalOptions()
    """Benchmarks before, during and after the stage."""
    log_every: int = Field(1, ge=1)
    """Steps between rows of metrics."""

    @property
    def native_servers(self) -> int:
        """How many servers of the native engine sample for the stage."""
        return 0

    @property
    def slot_servers(self) -> int:
        """How many generation servers are given a slot each."""
        return 0

    @model_validator(mode="after")
    def _ends(self) -> StageOptions:
        for name, most in (("steps", MOST_STEPS), ("epochs", MOST_EPOCHS)):
            if (getattr(self, name, None) or 0) > most:
                raise ValueError(f"{name} is more than any run takes: write {most:,} or fewer")
        return self

    def models_beside(self, *, has_adapter: bool) -> dict[str, bool]:
        """Which models the stage holds beside its policy, whose size they are planned with."""
        return {"critic": False, "reference": False}

    def plan_update(
        self, shape: Shape, model: ModelOptions, precision: Precision, tokens: int, *, has_adapter: bool, **layout: Any
    ) -> MemoryPlan:
        """The memory of an update of so many tokens at a time, with the models that the stage holds beside its policy;
        `layout` is what `plan_training` takes further."""
        plan = plan_training(shape, model, precision, tokens, moments=MOMENTS[self.optim.name], **layout)
        return plan.beside(**self.models_beside(has_adapter=has_adapter))

    def run(self, stage: Stage, fmt: Format) -> None:
        """The loop of this kind of stage, imported when it is needed."""
        raise NotImplementedError


class RecipeLike(Protocol):
    """What a run needs of a recipe, which is defined in a higher package."""

    @property
    def run(self) -> RunOptions: ...
    @property
    def cluster(self) -> ClusterOptions: ...
    @property
    def model(self) -> ModelOptions: ...
    @property
    def format(self) -> Format: ...
    @property
    def stages(self) -> Mapping[str, StageOptions]: ...
    def to_yaml(self) -> str: ...
    def digest(self) -> str: ...
    def digest_of(self, values: dict[str, Any]) -> str: ...
    def completed(self, values: Any) -> dict[str, Any] | None: ...
    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


def wanted_stages(stages: Iterable[str], skip: Sequence[str], only: Sequence[str]) -> list[str]:
    """The stages that run: all but those of `skip`, or those of `only`."""
    names = list(stages)
    for name in (*skip, *only):
        if name not in names:
            raise UserError(f"the recipe has no stage '{name}'", fix=nearest(name, names))
    if skip and only:
        raise UserError("skip and only exclude each other", fix="give one of the two")
    wanted = [name for name in names if name not in skip and (not only or name in only)]
    if not wanted:
        raise UserError("skip leaves no stage to run", fix="skip fewer of them")
    return wanted


def slot_servers(stages: Mapping[str, StageOptions]) -> int:
    """The most generation servers that are given a slot each, in any stage."""
    return max((stage.slot_servers for stage in stages.values()), default=0)


def usual_slots(recipe: RecipeLike, ranks: int) -> int:
    """How many slots a run begins with on so many ranks."""
    return recipe.cluster.slots or slots_for(ranks, slot_servers(recipe.stages))


def stage_before(stages: Mapping[str, StageOptions], name: str) -> str | None:
    """The stage whose model stage `name` starts from; None if that is the recipe's model."""
    names = list(stages)
    earlier = names[: names.index(name)]
    return stages[name].start_from or (earlier[-1] if earlier else None)


def taught_in(stages: Mapping[str, StageOptions], name: str) -> str | None:
    """The supervised stage that a stage builds on, if there is one."""
    before = stage_before(stages, name) if name in stages else None
    while before is not None and stages[before].kind != "supervised":
        before = stage_before(stages, before)
    return before
