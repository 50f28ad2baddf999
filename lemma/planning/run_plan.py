"""What a recipe would do on this machine, and what it lacks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lemma.core.errors import UserError
from lemma.engines.vllm.vllm_options import VllmOptions, head_refusal
from lemma.formats.chat import ChatFormat
from lemma.models.model_options import ModelOptions
from lemma.planning.data_amounts import amount_of
from lemma.planning.hub_needs import missing
from lemma.planning.local_gpus import gpu_memories, has_driver
from lemma.planning.plan_words import describe
from lemma.planning.stage_memory import config_file, head_size, memory_warnings
from lemma.recipe import Recipe
from lemma.runs.run_checks import check_inputs


@dataclass
class RunPlan:
    """The plan in words, what should be known before the run, and why it could not be made as planned."""

    text: str
    warnings: list[str]
    is_missing: bool
    is_too_large: bool

    @property
    def trouble(self) -> str | None:
        missing = ["something that it needs is missing or wrong"] * self.is_missing
        large = ["a stage does not fit into memory"] * self.is_too_large
        if not missing + large:
            return None
        return f"The run cannot be made as planned: {', and '.join(missing + large)} (see above)."


def plan_run(
    recipe: Recipe,
    names: Sequence[str],
    *,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    is_for_here: bool = True,
) -> RunPlan:
    """The plan of these stages. The hub is asked where the model or the data are there and not here. Unless it
    `is_for_here`, nothing is compared with this machine's GPUs."""
    doubts, lacking = [*foreign_sentences(recipe), *unused_template(recipe)], list(missing(recipe, names))
    amounts = {name: amount_of(recipe, recipe.stages[name], lacking.append) for name in names}
    has_gpu = has_driver()
    gpus = gpu_memories() if is_for_here and recipe.run.device != "cpu" else []
    large = memory_warnings(recipe, names, amounts, has_gpu=has_gpu, gpus=gpus)
    text = describe(recipe, skip=skip, only=only, amounts=amounts)
    refused = [*_refused(recipe, names), *_wrong_targets(recipe.model), *_wrong_heads(recipe, names)]
    # Without a GPU, a machine may only be the one that plans.
    is_known = recipe.run.device != "auto" or has_gpu
    return RunPlan(text, [*refused, *doubts, *lacking, *large], bool(refused or lacking), is_known and bool(large))


def preflight_warnings(recipe: Recipe, names: Sequence[str]) -> list[str]:
    """What is said before these stages run."""
    import torch

    sentences = [*foreign_sentences(recipe), *unused_template(recipe)]
    return [*sentences, *memory_warnings(recipe, names, has_gpu=torch.cuda.is_available())]


def foreign_sentences(recipe: Recipe) -> list[str]:
    """What a recipe's `cluster.config` says in vain, and, where it names none, what `accelerate launch` was told."""
    if recipe.cluster.config:
        from lemma.plugins.foreign_configs.foreign_configs import read_foreign

        return read_foreign(recipe.cluster.config).sentences(recipe.model_dump(mode="json"))
    told = [system for system in ("FSDP", "DeepSpeed") if os.environ.get(f"ACCELERATE_USE_{system.upper()}") == "true"]
    return [
        f"`accelerate launch` was given settings of {system}, which it keeps for its own library: name its file as "
        f"`cluster.config`; here cluster.shard is {recipe.cluster.shard}"
        for system in told
    ]


def _refused(recipe: Recipe, names: Iterable[str]) -> Iterator[str]:
    """Which files of these stages are not there, as the run would refuse them."""
    for name in names:
        try:
            check_inputs(recipe.stages, [name])
        except UserError as error:
            yield str(error)


def _wrong_targets(model: ModelOptions) -> Iterator[str]:
    """What is wrong with the layers that adapters are for, where the model's configuration is on this machine."""
    if model.lora is None or (model.lora.targets == "all-linear" and not model.lora.modules_to_save):
        return
    try:
        file = None if model.path == "tiny" else config_file(model)
        if file is None and model.path != "tiny":
            return
        from lemma.models.lora_targets import check_targets, skeleton, whole_layers

        module = skeleton(model, file)
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # a configuration that cannot be read is told with the model
    try:
        check_targets(module, model.lora.targets)
        whole_layers(module, model.lora.modules_to_save)
    except UserError as error:
        yield str(error)


def _wrong_heads(recipe: Recipe, names: Iterable[str]) -> Iterator[str]:
    """Why vLLM cannot run the model on a CPU, where a stage asks for that and the model's configuration is here."""
    asked = {name: getattr(recipe.stages[name], "rollout", recipe.stages[name].eval) for name in names}
    stages = [name for name, said in asked.items() if isinstance(said.engine, VllmOptions)]
    size = head_size(recipe.model) if stages and recipe.run.device == "cpu" else None
    refusal = None if size is None else head_refusal(size)
    if refusal is not None:
        yield f"{refusal}; write `engine: native` in stage {' and '.join(stages)}"


def unused_template(recipe: Recipe) -> list[str]:
    """A sentence where a recipe names no format, so that a model which has a chat template is not asked by it."""
    if "format" in recipe.model_fields_set or isinstance(recipe.format, ChatFormat):
        return []
    path = recipe.model.tokenizer or recipe.model.path
    if not _has_template(Path(path).expanduser()):
        return []
    name = recipe.format.name
    return [
        f"{path} has a chat template, and the format `{name}`, the default, does not use it; write `format: chat`, or "
        f"`format: {name}` to keep it"
    ]


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False
