"""Lengthening a run: more steps or epochs than it was started with, or further stages at the end."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

from lemma.core.errors import UserError
from lemma.core.faults import fault_point
from lemma.core.files import write_whole
from lemma.runs.run_folder import RunFolder
from lemma.runs.run_options import RecipeLike, StageOptions, stage_before

LENGTHS = ("steps", "epochs")


def lengthen(folder: RunFolder, recipe: RecipeLike, extend: bool, say: Callable[[str], None]) -> None:
    """Adopt this recipe for the run if it differs only in lengths and in new stages at the end.

    A stage whose schedule depends on its length is lengthened only with `extend`. Any other difference is left to
    `RunFolder.begin`, which refuses a run of another recipe.
    """
    facts = folder.facts()
    if facts is None or facts["digest"] == recipe.digest():
        return
    changed = _changed(folder, recipe, [facts["digest"], *facts.get("earlier", [])])
    if changed is None:
        return
    for name, (key, was, now) in changed.items():
        _check(folder, recipe.stages, name, key, was, now, extend)
    for name, (key, was, now) in changed.items():
        if folder.has_work(name):
            about = _about_schedule(recipe.stages[name])
            say(f"{name}: continues to {now:g} {key}; it was to end after {was:g}{about}")
        # This comes first: without the done mark, the stage resumes from its last checkpoint under either recipe.
        (folder.stage(name) / "done.json").unlink(missing_ok=True)
    facts |= {"digest": recipe.digest(), "earlier": [facts["digest"], *facts.get("earlier", [])]}
    fault_point("folder.lengthening")
    write_whole(folder.path / "run.json", json.dumps(facts, indent=1))
    fault_point("folder.lengthening")
    write_whole(folder.path / "recipe.yaml", recipe.to_yaml())


def _changed(folder: RunFolder, recipe: RecipeLike, known: list[str]) -> dict[str, tuple[str, float, float]] | None:
    """The lengths that differ, by stage, as key, old and new value; None if anything else differs as well."""
    try:
        before = folder.recipe()["stages"]
        lengths = {name: {key: before[name].get(key) for key in LENGTHS} for name in before}
    except (KeyError, TypeError, AttributeError):
        return None
    now = recipe.model_dump(mode="json")
    shortened = copy.deepcopy(now)
    if list(now["stages"])[: len(lengths)] != list(lengths):
        return None
    shortened["stages"] = {name: shortened["stages"][name] | lengths[name] for name in lengths}
    if recipe.digest_of(shortened) not in known:
        return None
    changed = {}
    for name, old in lengths.items():
        (key, was), (new_key, length) = _length(old), _length(now["stages"][name])
        if key != new_key:  # steps instead of epochs: which is longer depends on the data
            return None
        if length != was:
            changed[name] = (key, was, length)
    return changed


def _length(stage: Mapping[str, Any]) -> tuple[str, float]:
    return ("steps", stage["steps"]) if stage["steps"] is not None else ("epochs", stage["epochs"] or 1.0)


def _check(
    folder: RunFolder, stages: Mapping[str, StageOptions], name: str, key: str, was: float, now: float, extend: bool
) -> None:
    if not folder.has_work(name):
        return
    place = f"stages.{name}.{key} was {was:g}, is {now:g}"
    if now < was:
        raise UserError(f"{place}: a stage cannot be made shorter", fix=f"write {was:g}, or start over with --fresh")
    dependents = [other for other in stages if stage_before(stages, other) == name and folder.has_work(other)]
    if dependents:
        raise UserError(
            f"{place}, but stage {dependents[0]} continued from the model that {name} ended with",
            fix=f"write {was:g}, or give this run another run.dir",
        )
    if _about_schedule(stages[name]) and not extend:
        raise UserError(
            f"{place}, and its learning rate was planned for {was:g} {key}",
            fix=f"give --extend to go on with the plan for {now:g}, which makes the rate jump, or write {was:g}",
        )


def _about_schedule(stage: StageOptions) -> str:
    """How a longer stage changes the learning rate; empty if it does not depend on the length."""
    optim = stage.optim
    if optim.schedule != "constant":
        return f"; its {optim.schedule} schedule now ends there, so the learning rate jumps where it goes on"
    return "; its warm-up is a share of all steps, and may begin again" if 0 < optim.warmup < 1 else ""
