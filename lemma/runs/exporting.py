"""A model in the Hugging Face format from any checkpoint of a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from lemma.core.errors import UserError, nearest
from lemma.data.hub import hub_origin
from lemma.formats.format import PROMPT_FILE, trained_system
from lemma.learning.checkpoint import BrokenCheckpoint, Checkpoint, CheckpointStore
from lemma.learning.optimiser import Optimiser
from lemma.learning.optimiser_state import load_optimiser
from lemma.models.load_model import build_policy
from lemma.models.places import lasting
from lemma.runs.joined_adapters import Joined, adapters_before, join_adapters, name_base
from lemma.runs.run import RecipeLike
from lemma.runs.run_folder import RunFolder, refuse_links
from lemma.runs.run_options import stage_before

Kind = Literal["merged", "adapter"]


class Exported(NamedTuple):
    """The folder and, for an adapter, its base model and the error from joining stages."""

    folder: Path
    base: str | None = None
    joined: Joined | None = None
    stage: str = ""
    step: int = 0


def export_model(
    recipe: RecipeLike,
    run_dir: Path,
    *,
    stage: str | None,
    checkpoint: str,
    kind: Kind,
    to: Path | None,
    onto_base: bool = False,
    rank: int | None = None,
) -> Exported:
    """Write the model of a checkpoint (`last`, `best` or a step) of a stage (the newest by default).

    `onto_base` adds the adapters of earlier stages, so that a single adapter leads from the recipe's model to this one.
    """
    refuse_links(run_dir)  # it is written to
    folder = RunFolder(run_dir, only_read=True)
    try:
        name = stage or newest_stage(recipe, run_dir)
        if name not in recipe.stages:
            raise UserError(f"the run has no stage '{name}'", fix=nearest(name, recipe.stages))
        if kind == "adapter" and recipe.model.lora is None:
            raise UserError("this run trains full weights, so there is no adapter", fix="leave --adapter out")
        saved = _load(CheckpointStore(folder.stage(name) / "checkpoints", 1, lambda text: None), name, checkpoint)
        target = to or run_dir / "export" / f"{name}-{saved.step}-{'onto-base' if onto_base else kind}"
        if target.exists():
            raise UserError(f"{target} exists already", fix="name another folder with --to")
        return _write(recipe, folder, name, saved, kind, target, onto_base, rank)
    finally:
        folder.close()


def newest_stage(recipe: RecipeLike, run_dir: Path) -> str:
    """The last stage of the recipe that has a checkpoint."""
    with_checkpoints = [n for n in recipe.stages if any((run_dir / "stages" / n / "checkpoints").glob("step-*"))]
    if not with_checkpoints:
        raise UserError(f"{run_dir} holds no checkpoint", fix="train first; checkpoint.every says how often to save")
    return with_checkpoints[-1]


def step_of(store: CheckpointStore, stage: str, which: str) -> int:
    """The step of a checkpoint that is called `last`, `best` or by its step."""
    steps = store.steps()
    if which == "last":
        step = max(steps, default=None)
    elif which == "best":
        best = store.best()
        step = best["step"] if best else None
    elif which.isdigit():
        step = int(which) if int(which) in steps else None
    else:
        raise UserError(f"there is no checkpoint called '{which}'", fix="write last, best or a step")
    if step is None or step not in steps:
        kept = ", ".join(map(str, steps)) or "none"
        raise UserError(f"stage {stage} has no checkpoint '{which}'", fix=f"steps on disk: {kept}")
    return step


def _load(store: CheckpointStore, stage: str, which: str) -> Checkpoint:
    step = step_of(store, stage, which)
    try:
        return store.load(step)
    except BrokenCheckpoint as error:
        raise UserError(f"the checkpoint of step {step} is broken ({error})", fix="export another one") from error


def _write(
    recipe: RecipeLike,
    folder: RunFolder,
    name: str,
    saved: Checkpoint,
    kind: Kind,
    target: Path,
    onto_base: bool,
    rank: int | None,
) -> Exported:
    before = stage_before(recipe.stages, name)
    start_from = folder.checked_model(before) if before else None
    policy = build_policy(recipe.model, torch.device("cpu"), recipe.run.seed, start_from)
    system = trained_system(folder.stage(name))
    fmt = recipe.format if system is None else recipe.format.model_copy(update={"system": system})
    fmt.install(policy.tokenizer)
    optimiser = Optimiser(policy.parameters(), recipe.stages[name].optim)
    load_optimiser(optimiser, saved.tensors, saved.state["learner"]["optimiser"])
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    base: str | None = None
    joined: Joined | None = None
    if kind == "adapter":
        policy.save_adapter(partial)
        above = None if onto_base else start_from
        if onto_base:
            assert recipe.model.lora is not None
            earlier = [folder.stage(one) / "final" / "adapter" for one in _stages_before(recipe, name)]
            joined = join_adapters([*adapters_before(earlier, recipe.model.lora.r), partial], partial, rank)
        model = recipe.model
        source = str(above or model.path)
        base = hub_origin(Path(source)) or lasting(source)
        name_base(partial, base, model.revision if above is None else None)
    elif policy.is_adapter:
        policy.save_merged(partial)
    else:
        policy.save(partial)
    if system is not None:
        shutil.copy(folder.stage(name) / PROMPT_FILE, partial)
    os.replace(partial, target)
    return Exported(target, base, joined, name, saved.step)


def _stages_before(recipe: RecipeLike, name: str) -> list[str]:
    """The chain of stages that this one starts from, the first one first."""
    names: list[str] = []
    before = stage_before(recipe.stages, name)
    while before is not None:
        names.insert(0, before)
        before = stage_before(recipe.stages, before)
    return names
