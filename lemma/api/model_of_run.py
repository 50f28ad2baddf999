"""What the folder of a model tells: which checkpoint of a run to load, and which format it was trained in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.formats import Format
    from lemma.recipe import Recipe


def format_of_model(model: str, tokenizer: Any) -> dict[str, Any] | None:
    """The format of the run that a model is or lies in, else the one whose chat template its tokenizer has."""
    from lemma.formats import FORMATS, make_format

    folder = _run_of(model)
    if folder is not None:
        spec = make_format(_format_in(folder / "recipe.yaml")).model_dump(mode="json")
        system = _trained_system(model, folder)
        return spec if system is None else {**spec, "system": system}
    template = getattr(tokenizer, "chat_template", None)
    for name in FORMATS if template else ():
        for options in ({"name": name}, {"name": name, "bos": True}, {"name": name, "bos": False}):
            if make_format(options).template_for(tokenizer) == template:
                return options
    return None


def _format_in(recipe: Path) -> str | dict[str, Any]:
    """What a recipe says about the format; nothing else of it matters here."""
    from lemma.config.document import read
    from lemma.config.registry import beside

    said = beside(read(recipe).data.get("format"), recipe.parent)
    return said if isinstance(said, str | dict) else "r1_zero"


def recipe_of_model(model: str) -> Recipe | None:
    """The recipe of the run that a model is or lies in."""
    from lemma.recipe import load_recipe

    folder = _run_of(model)
    return None if folder is None else load_recipe(folder / "recipe.yaml")


def _run_of(model: str) -> Path | None:
    place = Path(model).absolute()
    runs = (one for one in (place, *place.parents) if (one / "recipe.yaml").is_file() and (one / "stages").is_dir())
    return next(runs, None)


def format_to_ask_in(
    model: str, tokenizer: Any, wanted: str | Mapping[str, Any] | None = None, system: str | None = None
) -> tuple[Format, bool]:
    """The format for questions to a model, and whether somebody chose it: here, or by training the model in it."""
    from lemma.formats import make_format

    spec = {"name": wanted} if isinstance(wanted, str) else wanted or format_of_model(model, tokenizer)
    is_chosen = spec is not None
    if spec is None:
        spec = {"name": "boxed" if getattr(tokenizer, "chat_template", None) else "r1_zero"}
    if system is not None:
        spec = {**spec, "system": system}
    return make_format(spec), is_chosen


def _trained_system(model: str, run: Path) -> str | None:
    """The system message that the rows brought which the model was trained on, where they did."""
    from lemma.formats.format import trained_system
    from lemma.models.places import resolve

    place = Path(resolve(model)).absolute()
    inside = [place, *(folder for folder in place.parents if folder.is_relative_to(run))]
    return next((system for system in map(trained_system, inside) if system is not None), None)


def is_checkpoint(model: str) -> bool:
    """Whether this is the folder of a checkpoint."""
    place = Path(model).expanduser()
    return place.parent.name == "checkpoints" and place.name.startswith("step-") and place.is_dir()


def model_at(model: str, checkpoint: str | None) -> str:
    """What to load: the model itself, or, for a checkpoint's folder or a checkpoint of a run or of its stage, the
    exported model, which is written below the run unless it is there."""
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
    from lemma.learning.checkpoint import CheckpointStore
    from lemma.recipe import load_recipe
    from lemma.runs.exporting import export_model, newest_stage, step_of

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
