"""A run: its stages in order, each starting from the model of an earlier one, resumed where they stopped."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lemma.cluster.cluster_options import ClusterOptions
from lemma.cluster.launching import is_begun_already
from lemma.config.document import leaves
from lemma.core.collector import set_aside
from lemma.core.errors import UserError
from lemma.core.events import Progressed, Said, Sink, Tell, telling
from lemma.core.outside import training
from lemma.core.ranks import from_leader, is_leader, together, use_slots, world_size
from lemma.learning.divergence import Diverged
from lemma.models.load_model import pick_device
from lemma.models.places import TINY, resolve
from lemma.runs.fitted import what_to_split
from lemma.runs.lengthening import lengthen
from lemma.runs.run_checks import check_inputs, check_split
from lemma.runs.run_folder import RunFolder
from lemma.runs.run_options import (
    RecipeLike,
    RunOptions,
    StageOptions,
    slot_servers,
    stage_before,
    taught_in,
    usual_slots,
    wanted_stages,
)
from lemma.runs.stage import Stage
from lemma.runs.stopping import Stopped, StopSignal


def train(
    recipe: RecipeLike,
    *,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    fresh: bool = False,
    extend: bool = False,
    sink: Sink,
) -> int:
    """Run every stage that is not done yet. Returns the exit code: 0 if finished or stopped cleanly.

    With `extend`, a stage that is longer than before continues even if its schedule depends on its length.
    """
    wanted = {name: recipe.stages[name] for name in wanted_stages(recipe.stages, skip, only)}
    if world_size() > 1:
        check_split(recipe.cluster, recipe.model, wanted)
    there = RunFolder(Path(recipe.run.dir), only_read=True)
    fresh = fresh and not from_leader(lambda: is_begun_already(there.path), "the run folder")
    check_inputs(recipe.stages, [n for n in wanted if fresh or not there.is_done(n)])
    device = pick_device(recipe.run.device)
    if recipe.model.path != TINY:
        _check_start(Path(resolve(recipe.model.path)))
    folder = _opened(Path(recipe.run.dir))
    try:
        anew = list(wanted) if fresh else []
        facts = from_leader(lambda: _begun(recipe, folder, anew, fresh, extend, sink), "the run folder")
        folder.follow(facts)
        torch.set_num_threads(int(facts["threads"]))
        _take_slots(recipe.cluster, wanted, int(facts.get("slots", 1)), sink)
        _determinism(recipe.run, device, sink)
        with StopSignal().listening() as stop, set_aside(), training(), telling(_tell_to(sink)):
            return _run_stages(recipe, list(wanted), folder, device, sink, stop)
    except UserError:
        if is_leader():
            folder.put_back()
        raise
    finally:
        folder.close()


def _tell_to(sink: Sink) -> Tell:
    """Tells how far work is: in a sentence when it is first heard of, then as progress."""
    heard: set[str] = set()

    def tell(what: str, done: int, total: int) -> None:
        if what not in heard:
            heard.add(what)
            sink(Said(f"{what}: {total:,}"))
        sink(Progressed(what, done, total))

    return tell


def _opened(path: Path) -> RunFolder:
    """The folder: the first rank holds its lock, the others only read."""
    folders: list[RunFolder] = []
    together(lambda: folders.append(RunFolder(path, only_read=not is_leader())), "the run folder")
    return folders[0]


def _begun(
    recipe: RecipeLike, folder: RunFolder, anew: Sequence[str], fresh: bool, extend: bool, sink: Sink
) -> dict[str, Any]:
    """What the first rank does before any training: check what is there, and record what the run is."""
    _check_dependents(recipe.stages, anew, folder)
    if not fresh and folder.facts() is not None:
        lengthen(folder, recipe, extend, lambda text: sink(Said(text)))
        _check_version(folder, recipe)
    threads = recipe.run.threads or torch.get_num_threads()
    slots = usual_slots(recipe, world_size())
    return folder.begin(recipe.to_yaml(), recipe.digest(), threads, fresh=anew, slots=slots)


def _check_version(folder: RunFolder, recipe: RecipeLike) -> None:
    """Refuse a run of this recipe that a version without some of its options began: with new options, what the others
    do may have changed, and the run would end as neither version's."""
    facts = folder.facts()
    if facts is None or facts["digest"] == recipe.digest() or not folder.has_begun():
        return
    before = folder.recipe()
    completed = recipe.completed(before)
    if completed is None or recipe.digest_of(completed) != recipe.digest():
        return
    missing = [key for key in leaves(completed) if key not in leaves(before)]
    if missing:
        version = f"Lemma {facts['lemma']}" if "lemma" in facts else "a Lemma"
        day = str(facts.get("created", "another day"))[:10]
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"{folder.given} was begun by {version} of {day}, which did not have the option {missing[0]}{more} of this "
            "recipe",
            fix="finish it with that Lemma, start over with --fresh, or change run.dir",
        )


def _take_slots(cluster: ClusterOptions, stages: Mapping[str, StageOptions], recorded: int, sink: Sink) -> None:
    if cluster.slots not in (None, recorded):
        raise UserError(
            f"cluster.slots is {cluster.slots}, and this run began with {recorded}",
            fix=f"write `slots: {recorded}`, or start over with --fresh",
        )
    use_slots(recorded)
    for count, who in ((world_size(), "ranks"), (slot_servers(stages), "generation servers")):
        if recorded < count:
            sink(
                Said(
                    f"the run began with {recorded} slots, so {count - recorded} of {count} {who} have nothing to do; "
                    "a run that may use more of them begins with a larger `cluster.slots`",
                    "warning",
                )
            )


def _check_start(place: Path) -> None:
    """Verify every byte of a model that another run finished, as a stage does with its predecessor's."""
    for final in (place, place.parent):
        stage = final.parent
        if final.name == "final" and stage.parent.name == "stages" and (stage / "done.json").is_file():
            RunFolder(stage.parents[1], only_read=True).checked_model(stage.name)


def _check_dependents(stages: Mapping[str, StageOptions], anew: Sequence[str], folder: RunFolder) -> None:
    """Refuse to restart a stage while keeping one that started from it: the origin of its model would be gone."""
    lost = set(anew)
    for name in stages:
        before = stage_before(stages, name)
        if before in lost and name not in lost and folder.has_work(name):
            raise UserError(
                f"stage {name} continued from {before}, which --fresh would start over",
                fix=f"start {name} over as well: --only {before} --only {name}",
            )


def _run_stages(
    recipe: RecipeLike,
    wanted: list[str],
    folder: RunFolder,
    device: torch.device,
    sink: Sink,
    stop: StopSignal,
) -> int:
    for name in wanted:
        before = stage_before(recipe.stages, name)
        if before is not None and before not in wanted and not folder.is_done(name):
            _check_skipped(folder, before)
    for number, name in enumerate(wanted):
        options, before = recipe.stages[name], stage_before(recipe.stages, name)
        if folder.is_done(name):
            sink(Said(f"{name}: done already"))
        else:
            start = folder.checked_model(before) if before else None
            stage = Stage(
                name,
                options,
                recipe.model,
                folder,
                sink,
                stop,
                seed=recipe.run.seed,
                device=device,
                start_from=start,
                earlier=list(recipe.stages)[: list(recipe.stages).index(name)],
                recipe=recipe.model_dump(mode="json"),
                taught_in=taught_in(recipe.stages, name),
                is_continued=any(stage_before(recipe.stages, other) == name for other in recipe.stages),
                shard=what_to_split(recipe, name, device, start),
            )
            try:
                options.run(stage, recipe.format)
            except Stopped:
                sink(Said(f"{name}: stopped after saving; the same command resumes from here"))
                return 0
            except Diverged as error:
                raise stage.explain(error) from error
            finally:
                stage.store.settle()
            _release_memory(device)
            if wanted[number + 1 :] and stop.is_agreed():
                sink(Said(f"{name}: done; stopped before the next stage; the same command resumes from here"))
                return 0
    final = folder.final_model(wanted[-1])
    sink(Said(f"the model is in {final and folder.shown(final)}"))
    return 0


def _check_skipped(folder: RunFolder, name: str) -> None:
    if folder.final_model(name) is None:
        raise UserError(
            f"stage {name} is skipped, but {folder.shown(folder.stage(name) / 'final')} holds no model to go on from",
            fix="run that stage first",
        )


def _determinism(run: RunOptions, device: torch.device, sink: Sink) -> None:
    if device.type == "cpu":
        return
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    else:
        sink(Said("not bit-exact: on a GPU write `run.deterministic: true` for runs that repeat to the last bit"))


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
