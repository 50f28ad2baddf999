"""What is refused before anything is trained: files that are not there, since those of a later stage must not waste an
earlier one, and what stages cannot do with weights sharded across the ranks. Imports no torch: a dry run stays
fast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lemma.cluster.cluster_options import ClusterOptions
from lemma.core.errors import UserError
from lemma.data.data_options import DataOptions, journal_place
from lemma.data.sources import BUILT_IN, files_of
from lemma.evaluation.benchmarks import check_benchmark
from lemma.models.model_options import ModelOptions
from lemma.models.places import TINY, resolve
from lemma.runs.ingredients import models_beside
from lemma.runs.run_options import StageOptions

Refusal = tuple[str, str]


def check_inputs(stages: Mapping[str, StageOptions], names: Iterable[str]) -> None:
    """Refuse missing files and reward functions of these stages. The hub is not asked."""
    for name in names:
        try:
            _check(stages[name])
        except UserError as error:
            raise UserError(
                f"stage {name}: {error.problem}", file=error.file, line=error.line, fix=error.fix
            ) from error


def _check(stage: StageOptions) -> None:
    for path in models_beside(stage).values():
        if path != TINY:
            resolve(path)
    for reward in getattr(stage, "rewards", ()):
        reward.check()
    environment = getattr(stage, "environment", None)
    if environment is not None and not environment.is_single_turn:
        environment.check()
    validation = getattr(stage, "validation", None)
    for data in (getattr(stage, "data", None), getattr(validation, "data", None)):
        if isinstance(data, DataOptions):
            for source in data.mix or [data]:
                if source.source not in BUILT_IN and journal_place(source.source) is None:
                    files_of(source)
    for benchmark in stage.eval.benchmarks:
        check_benchmark(benchmark, data_dir=stage.eval.data_dir)


def check_split(cluster: ClusterOptions, model: ModelOptions, stages: Mapping[str, StageOptions]) -> None:
    """Refuse, in one sentence, what `shard: weights` cannot do."""
    for name, stage in stages.items() if cluster.shard == "weights" else ():
        refusal = split_refusal(cluster, model, name, stage)
        if refusal is not None:
            raise UserError(f"cluster.shard: weights {refusal[0]}", fix=refusal[1])


def split_refusal(cluster: ClusterOptions, model: ModelOptions, name: str, stage: StageOptions) -> Refusal | None:
    """Why a stage cannot have its weights sharded, and what to write instead; None if it can."""
    if model.quantize is not None:
        return "does not split quantised weights (model.quantize)", "write `shard: optimiser`"
    if model.lora is not None and model.lora.modules_to_save:
        return "does not split layers trained whole (model.lora.modules_to_save)", "write `shard: gradients`"
    if model.compile:
        return "does not go together with model.compile", "write `model.compile: false`, or `shard: gradients`"
    if stage.optim.name == "adamw_8bit":
        return (
            f"does not go together with the 8-bit moments of stages.{name}.optim",
            "write `optim.name: adamw`, or `shard: gradients`",
        )
    reference = getattr(stage, "reference_model", None)
    if reference is not None and reference.every is not None:
        return (
            f"does not go together with the reference of stages.{name}, which follows the policy",
            "remove `every` from its reference_model, or write `shard: gradients`",
        )
    engine = getattr(getattr(stage, "rollout", None), "engine", None)
    is_sampled = engine is not None
    if not is_sampled and stage.eval.benchmarks:
        engine = stage.eval.engine
    if engine is None or (engine.has_own_devices):
        return None
    if not is_sampled:
        return (
            f"leaves no whole weights to generate with for stages.{name}.eval.benchmarks",
            "write `eval.engine: {name: native, servers: 1}`, evaluate the final model with `lemma eval`, or write "
            "`shard: gradients`",
        )
    return (
        f"leaves no whole weights in the ranks that learn for the {engine.name} engine of stages.{name}",
        "let servers generate: write `rollout.engine: {name: native, servers: 1}`, or vLLM with `mode: server`",
    )
