"""A model in the Hugging Face format from any checkpoint of a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

import torch

from lemma.core.errors import UserError, nearest
from lemma.learning.checkpoint import BrokenCheckpoint, Checkpoint, CheckpointStore
from lemma.learning.optimiser import Optimiser
from lemma.models.load_model import build_policy
from lemma.runs.run import RecipeLike
from lemma.runs.run_folder import RunFolder
from lemma.runs.run_options import stage_before

Kind = Literal["merged", "adapter"]


def export_model(
    recipe: RecipeLike, run_dir: Path, *, stage: str | None, checkpoint: str, kind: Kind, to: Path | None
) -> Path:
    """Write the model of a checkpoint (`last`, `best` or a step) of a stage (the newest by default); its folder."""
    folder = RunFolder(run_dir, only_read=True)
    try:
        name = stage or _newest_stage(recipe, folder)
        if name not in recipe.stages:
            raise UserError(f"the run has no stage '{name}'", fix=nearest(name, recipe.stages))
        if kind == "adapter" and recipe.model.lora is None:
            raise UserError("this run trains full weights, so there is no adapter", fix="leave --adapter out")
        saved = _load(CheckpointStore(folder.stage(name) / "checkpoints", 1, lambda text: None), name, checkpoint)
        target = to or run_dir / "export" / f"{name}-{saved.step}-{kind}"
        if target.exists():
            raise UserError(f"{target} exists already", fix="name another folder with --to")
        _write(recipe, folder, name, saved, kind, target)
        return target
    finally:
        folder.close()


def _newest_stage(recipe: RecipeLike, folder: RunFolder) -> str:
    with_checkpoints = [n for n in recipe.stages if any((folder.stage(n) / "checkpoints").glob("step-*"))]
    if not with_checkpoints:
        raise UserError(
            f"{folder.path} holds no checkpoint", fix="train first; checkpoint.every says how often to save"
        )
    return with_checkpoints[-1]


def _load(store: CheckpointStore, stage: str, which: str) -> Checkpoint:
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
    try:
        return store.load(step)
    except BrokenCheckpoint as error:
        raise UserError(f"the checkpoint of step {step} is broken ({error})", fix="export another one") from error


def _write(recipe: RecipeLike, folder: RunFolder, name: str, saved: Checkpoint, kind: Kind, target: Path) -> None:
    before = stage_before(recipe.stages, name)
    start_from = folder.checked_model(before) if before else None
    policy = build_policy(recipe.model, torch.device("cpu"), recipe.run.seed, start_from)
    recipe.format.install(policy.tokenizer)
    optimiser = Optimiser(policy.parameters(), recipe.stages[name].optim)
    optimiser.load(saved.tensors, saved.state["learner"]["optimiser"])
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if kind == "adapter":
        policy.save_adapter(partial)
    elif policy.is_adapter:
        policy.save_merged(partial)
    else:
        policy.save(partial)
    os.replace(partial, target)
