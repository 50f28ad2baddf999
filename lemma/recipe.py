"""The recipe: a run folder, a model, a format and stages. Builds the typed unions from the registries of components."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails

from lemma.algorithms import ALGORITHMS
from lemma.algorithms.preference import PREFERENCE_ALGORITHMS
from lemma.cluster.cluster_options import ClusterOptions
from lemma.config import Options
from lemma.config.document import write
from lemma.config.load import load
from lemma.config.registry import without_folders
from lemma.config.shape import Choice
from lemma.core.errors import UserError, nearest
from lemma.engines.engine_options import VllmEngineOptions
from lemma.formats import FORMATS, Format
from lemma.formats.r1_zero import R1Zero
from lemma.models.model_options import ModelOptions
from lemma.runs.run_options import STAGE_NAME, RunOptions, StageOptions
from lemma.stages.preference.preference_options import PreferenceOptions
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.supervised_options import SupervisedOptions

STAGES: dict[str, type[StageOptions]] = {
    "supervised": SupervisedOptions,
    "preference": PreferenceOptions,
    "rl": ReinforcementOptions,
}

LONGEST_STAGE = 64
StageName = Annotated[str, StringConstraints(pattern=f"^{STAGE_NAME}$")]
# A stage that is called like an algorithm is one of that kind with that algorithm.
_IMPLIED: dict[str, dict[str, Any]] = {"sft": {"kind": "supervised"}}
_IMPLIED |= {name: {"kind": "rl", "algorithm": {"name": name}} for name in ALGORITHMS}
_IMPLIED |= {name: {"kind": "preference", "algorithm": {"name": name}} for name in PREFERENCE_ALGORITHMS}
_stage = Choice(STAGES, by="kind", implied=_IMPLIED)

# What a run may change without changing its results: `*` stands for any name.
WITHOUT_EFFECT = [
    ("cluster",),
    ("run", "dir"),
    ("run", "tensorboard"),
    ("run", "wandb"),
    ("run", "loggers"),
    ("model", "lora", "merged"),
    ("stages", "*", "checkpoint", "keep"),
    ("stages", "*", "journal", "keep"),
    ("stages", "*", "journal", "notes"),
    ("stages", "*", "rollout", "engine", "servers"),
    ("stages", "*", "rollout", "engine", "gpus"),
    ("stages", "*", "data", "cache"),
    ("stages", "*", "validation", "data", "cache"),
]
# Of these, what ranks must have alike all the same.
SHARED = [
    ("cluster",),
    ("stages", "*", "rollout", "engine", "servers"),
    ("stages", "*", "rollout", "engine", "gpus"),
]


class Recipe(Options):
    """Everything that defines a run."""

    run: RunOptions = RunOptions()
    """The run folder, the seed, where to compute."""
    model: ModelOptions = ModelOptions()
    """The model to train."""
    format: Annotated[Format, Choice(FORMATS, by="name")] = Field(default_factory=R1Zero)
    """How a problem becomes a prompt and a completion becomes an answer: a name, or a mapping with name and options."""
    cluster: ClusterOptions = ClusterOptions()
    """Training on several processes, GPUs or machines."""
    stages: dict[StageName, Annotated[StageOptions, _stage]] = Field(default_factory=dict, validate_default=True)
    """The stages by name, in the order in which they run; at least one."""

    @model_validator(mode="before")
    @classmethod
    def _from_another_system(cls, data: Any) -> Any:
        """What `cluster.config` says takes the place of what is not written here."""
        cluster = data.get("cluster") if isinstance(data, dict) else None
        if not (isinstance(cluster, dict) and cluster.get("config")):
            return data
        from lemma.plugins.foreign_configs.foreign_configs import fill

        return fill(data, _kind_of)

    @field_validator("stages", mode="before")
    @classmethod
    def _kinds(cls, stages: Any) -> Any:
        """A stage whose name tells its kind need not repeat it."""
        if not isinstance(stages, dict):
            raise ValueError("every stage has a name; write for example `stages: {sft: {steps: 100}}`")
        if any(len(str(name)) > LONGEST_STAGE for name in stages):
            raise ValueError(f"the name of a stage has at most {LONGEST_STAGE} letters")
        if not stages:
            raise ValueError("a recipe needs at least one stage; write for example `stages: {sft: {steps: 100}}`")
        return {name: _stage.expand(stage, name) for name, stage in stages.items()}

    @field_validator("stages")
    @classmethod
    def _start_from_earlier_stages(cls, stages: dict[str, StageOptions]) -> dict[str, StageOptions]:
        names = list(stages)
        for number, stage in enumerate(stages.values()):
            wanted, earlier = stage.start_from, names[:number]
            if wanted is not None and wanted not in earlier:
                fix = nearest(wanted, earlier) if earlier else "remove start_from: this is the first stage"
                wrong = ValueError(f"there is no earlier stage '{wanted}'; {fix}")
                place = (names[number], "start_from")
                error = InitErrorDetails(type="value_error", loc=place, input=wanted, ctx={"error": wrong})
                raise ValidationError.from_exception_data("Recipe", [error])
        return stages

    @model_validator(mode="after")
    def _samples_are_what_is_learnt(self) -> Recipe:
        learns = [name for name, stage in self.stages.items() if isinstance(stage, ReinforcementOptions)]
        if learns and self.model.lora is not None and self.model.lora.dropout > 0:
            raise ValueError(
                f"stage {learns[0]} learns from samples that are drawn without dropout; write `model.lora.dropout: 0`"
            )
        return self

    @model_validator(mode="after")
    def _engines_run_the_adapter(self) -> Recipe:
        lora = self.model.lora
        unknown = {"dora": "DoRA adapters", "modules_to_save": "adapters with layers that are trained whole"}
        for option, what in unknown.items() if lora is not None else ():
            for name, stage in self.stages.items() if getattr(lora, option) else ():
                does, engine = "evaluates", stage.eval.engine if stage.eval.benchmarks else None
                if isinstance(stage, ReinforcementOptions):
                    does, engine = "samples", stage.rollout.engine
                if isinstance(engine, VllmEngineOptions):
                    raise ValueError(
                        f"vLLM cannot run {what}, and stage {name} {does} with it; write `engine: native` there, or "
                        f"remove `{option}` from model.lora"
                    )
        return self

    @model_validator(mode="after")
    def _stages_have_what_they_ask_for(self) -> Recipe:
        samples = False
        for name, stage in self.stages.items():
            if isinstance(stage, PreferenceOptions | SupervisedOptions | ReinforcementOptions):
                place, wrong = stage.missing(has_adapter=self.model.lora is not None, has_samples=samples)
                if wrong:
                    error = InitErrorDetails(
                        type="value_error", loc=("stages", name, *place), input=None, ctx={"error": ValueError(wrong)}
                    )
                    raise ValidationError.from_exception_data("Recipe", [error])
            samples = samples or isinstance(stage, ReinforcementOptions)
        return self

    def reinforcing(self, wanted: str | None = None) -> ReinforcementOptions:
        """The stage of this name, else the last one that reinforces."""
        stages = {name: one for name, one in self.stages.items() if isinstance(one, ReinforcementOptions)}
        if wanted is not None and wanted not in stages:
            raise UserError(f"the recipe has no stage '{wanted}' of kind rl", fix=nearest(wanted, stages))
        if not stages:
            raise UserError("the recipe has no stage of kind rl", fix="add one with an `environment`")
        return stages[wanted] if wanted is not None else list(stages.values())[-1]

    def to_yaml(self) -> str:
        """Every value of this recipe; loading it gives an equal recipe."""
        return write(self.model_dump(mode="json"))

    def digest(self) -> str:
        """A name for everything in here that determines results."""
        return self.digest_of(self.model_dump(mode="json"))

    @classmethod
    def completed(cls, values: Any) -> dict[str, Any] | None:
        """The values of a recipe that another version wrote, with defaults for what it lacks; None if this version
        does not read it."""
        try:
            return cls.model_validate(values).model_dump(mode="json")
        except (ValidationError, UserError):
            return None

    def shared_settings(self) -> dict[str, Any]:
        """What all ranks of a run must have alike; folders may have other names on other machines."""
        values = self.model_dump(mode="json")
        for path in WITHOUT_EFFECT:
            if path not in SHARED:
                _remove(values, path)
        return dict(without_folders(values))

    def digest_of(self, values: dict[str, Any]) -> str:
        """The same of these values in the place of its own; they lose what has no effect. Where Python files lie has
        none: what they hold is compared by itself."""
        for path in WITHOUT_EFFECT:
            _remove(values, path)
        values = without_folders(values)
        text = json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `a.b=c` overrides; every mistake is a `UserError` of one sentence."""
    return load(Recipe, path, overrides)


def _kind_of(name: str, stage: Any) -> Any:
    """The kind of a stage by its name and what is written under it."""
    told = _stage.expand(stage, name)
    return told.get("kind") if isinstance(told, dict) else None


def _remove(values: Any, path: Sequence[str]) -> None:
    if not isinstance(values, Mapping):
        return
    step, *rest = path
    if rest:
        for name in values if step == "*" else [step]:
            _remove(values.get(name), rest)
    elif isinstance(values, dict):
        values.pop(step, None)
