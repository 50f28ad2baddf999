"""The model of a run's checkpoint, as a folder to load from."""

from __future__ import annotations

from pathlib import Path

from lemma.core.errors import UserError


def is_checkpoint(model: str) -> bool:
    """Whether this is the folder of a checkpoint."""
    place = Path(model).expanduser()
    return place.parent.name == "checkpoints" and place.name.startswith("step-") and place.is_dir()


def model_at(model: str, checkpoint: str | None) -> str:
    """What to load: the model itself, or, for a checkpoint's folder or a checkpoint of a run or of its stage, the
    exported model, which is written below the run unless it is there."""
    from lemma.learning.checkpoint import CheckpointStore
    from lemma.recipe import load_recipe
    from lemma.runs.exporting import export_model, newest_stage, step_of

    place = Path(model).expanduser().absolute()
    if is_checkpoint(model):
        if checkpoint is not None:
            raise UserError(f"{model} is a checkpoint already", fix="leave --checkpoint out, or give the run")
        run, stage, checkpoint = place.parents[3], place.parents[1].name, str(int(place.name.removeprefix("step-")))
    elif checkpoint is None:
        return model
    else:
        is_stage = place.parent.name == "stages"
        run, stage = (place.parents[1], place.name) if is_stage else (place, "")
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{model} has no checkpoints", fix="give the folder of a run, or leave --checkpoint out")
    recipe = load_recipe(run / "recipe.yaml")
    stage = stage or newest_stage(recipe, run)
    folder = run / "stages" / stage / "checkpoints"
    step = step_of(CheckpointStore(folder, 1, lambda text: None), stage, checkpoint)
    target = run / "export" / f"{stage}-{step}-merged"
    if not target.exists():
        export_model(recipe, run, stage=stage, checkpoint=str(step), kind="merged", to=target)
    elif target.stat().st_mtime < (folder / f"step-{step:08d}").stat().st_mtime:
        raise UserError(f"{target} is older than the checkpoint of step {step}", fix="remove it")
    return str(target)
