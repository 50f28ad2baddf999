"""A run: its stages, its folder, and going on after a fall, in this process."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from lemma.core import faults
from lemma.core.errors import UserError
from lemma.core.events import Awaited, Event, Progressed, Said, Sink, StageEnded, StageStarted
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions, TinyOptions
from lemma.recipe import Recipe
from lemma.runs.run import train
from tests.preloaded import Python
from tests.pretended import pretend_installed
from tests.stages.sft_world import World

# --- stages ----------------------------------------------------------------------------------------------------------

TWO = {"first": {"steps": 3}, "second": {"steps": 2, "optim": {"lr": 1e-3}, "validation": {}}}


def test_a_stage_starts_from_the_model_of_the_one_before(world: World) -> None:
    """And with --skip from what it left behind earlier; without that there is nothing to start from."""
    recipe = world.recipe(stages=TWO)
    with pytest.raises(UserError) as caught:
        world.train(recipe, skip=["first"])
    assert str(caught.value) == (
        f"stage first is skipped, but {world.final('first')} holds no model to go on from; run that stage first"
    )
    assert world.train(recipe, only=["first"]) == 0
    assert not world.final("second").exists()
    assert world.train(recipe, skip=["first"]) == 0
    in_two = world.weights("second"), world.numbers()
    assert world.train(recipe, fresh=True) == 0
    assert (world.weights("second"), world.numbers()) == in_two
    first = transformers.AutoModelForCausalLM.from_pretrained(world.final("first")).model.norm.weight
    second = transformers.AutoModelForCausalLM.from_pretrained(world.final("second")).model.norm.weight
    assert 0 < (first - second).abs().max().item() < 2 * 1e-3 + 1e-6, "two steps of 1e-3 from the first model"


def test_a_stage_starts_from_the_stage_that_it_names(world: World, tmp_path: Path) -> None:
    """The same weights as without the stage between them; a stage that nobody starts from may be skipped unrun."""
    other = World(tmp_path / "other")
    other.folder.mkdir()
    assert other.train(other.recipe(stages=TWO)) == 0
    three = {"first": TWO["first"], "middle": {"steps": 1}, "second": TWO["second"] | {"start_from": "first"}}
    recipe = world.recipe(stages=three)
    assert world.train(recipe, skip=["middle"]) == 0
    assert world.weights("second") == other.weights("second")
    assert world.said()[-1] == f"the model is in {world.final('second')}"
    assert world.train(recipe) == 0
    assert world.weights("middle") != world.weights("first")
    assert world.train(recipe, fresh=True) == 0
    assert world.weights("second") == other.weights("second")


def test_a_skipped_stage_without_a_model_is_noticed_before_anything_is_trained(world: World) -> None:
    three = TWO | {"third": {"steps": 1}}
    with pytest.raises(UserError, match=r"stage second is skipped, but .* holds no model to go on from"):
        world.train(world.recipe(stages=three), skip=["second"])
    assert not world.final("first").exists()


def test_adapters_in_two_stages(world: World) -> None:
    assert world.train(world.recipe(stages=TWO, lora={"r": 2})) == 0
    settings = json.loads((world.final("second") / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == world.recipe().model.path and settings["r"] == 4


def test_stages_that_are_not_there(world: World) -> None:
    with pytest.raises(UserError, match="the recipe has no stage 'frist'; did you mean 'first'"):
        world.train(world.recipe(stages=TWO), skip=["frist"])


# --- the folder ------------------------------------------------------------------------------------------------------


def test_another_recipe_in_the_same_folder(world: World) -> None:
    assert world.train(world.recipe({"steps": 2})) == 0
    before = world.weights()
    other = world.recipe({"steps": 2, "optim": {"lr": 1e-4}})
    with pytest.raises(UserError) as caught:
        world.train(other)
    assert str(caught.value) == (
        f"{world.run} holds a run of another recipe (stages.sft.optim.lr was 0.002, is 0.0001); change run.dir, "
        "restore the recipe, or start over with --fresh"
    )
    assert world.weights() == before
    (world.run / "notes.txt").write_text("mine")
    assert world.train(other, fresh=True) == 0
    assert world.weights() != before and (world.run / "notes.txt").read_text() == "mine"
    assert [row["step"] for row in world.rows() if row["axis"] == "train"] == [1, 2]


def test_a_run_that_a_version_without_some_options_began(world: World) -> None:
    """The same recipe is called the same; what the user changed as well is named before what is new in Lemma."""
    recipe = world.recipe({"steps": 2})
    assert world.train(recipe) == 0
    values, facts = recipe.model_dump(mode="json"), json.loads((world.run / "run.json").read_text())
    del values["stages"]["sft"]["shuffle"], values["model"]["share_prompts"], values["model"]["tiny"]["context"]
    (world.run / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    facts |= {"digest": recipe.digest_of(values), "created": "2026-03-05T10:11:12"}
    del facts["lemma"]
    (world.run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"holds a run of another recipe \(model.tiny.context was not there, is 96\)"):
        world.train(recipe)
    values["model"]["tiny"]["context"] = 96
    (world.run / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (world.run / "run.json").write_text(json.dumps(facts | {"digest": recipe.digest_of(values), "lemma": "0.0.9"}))
    with pytest.raises(UserError) as caught:
        world.train(recipe)
    assert str(caught.value) == (
        f"{world.run} was begun by Lemma 0.0.9 of 2026-03-05, which did not have the option model.share_prompts and 1 "
        "more of this recipe; finish it with that Lemma, start over with --fresh, or change run.dir"
    )
    with pytest.raises(UserError, match=r"another recipe \(stages.sft.optim.lr was 0.002, is 0.0001\)"):
        world.train(world.recipe({"steps": 2, "optim": {"lr": 1e-4}}))
    assert world.train(recipe, fresh=True) == 0


def test_a_first_start_that_fails_leaves_nothing_in_the_way(world: World) -> None:
    with pytest.raises(UserError):
        world.train(world.recipe({"data": {"source": "nowhere.jsonl"}}))
    assert world.train(world.recipe({"steps": 1})) == 0


def test_a_fresh_start_that_fails_puts_the_run_back(world: World) -> None:
    assert world.train(world.recipe({"steps": 2})) == 0
    before = world.weights(), world.numbers()
    with pytest.raises(UserError):
        world.train(world.recipe({"data": {"source": "nowhere.jsonl"}}), fresh=True)
    assert (world.weights(), world.numbers()) == before
    assert not (world.run / ".earlier").exists()
    assert world.train(world.recipe({"steps": 2})) == 0 and "sft: done already" in world.said()


def test_a_fresh_start_of_one_stage_keeps_the_others(world: World) -> None:
    recipe = world.recipe(stages=TWO)
    assert world.train(recipe) == 0
    first, second, rows = world.weights("first"), world.weights("second"), world.numbers()
    assert world.train(recipe, only=["second"], fresh=True) == 0
    assert (world.weights("first"), world.weights("second"), world.numbers()) == (first, second, rows)


@pytest.mark.parametrize("second_has_begun", [True, False])
def test_a_fresh_start_below_a_stage_that_went_on_is_refused(world: World, second_has_begun: bool) -> None:
    recipe = world.recipe(stages=TWO)
    assert world.train(recipe, only=["first"]) == 0
    if not second_has_begun:
        assert world.train(recipe, only=["first"], fresh=True) == 0
        return
    assert world.train(recipe) == 0
    before = world.weights("first"), world.weights("second"), world.numbers()
    with pytest.raises(UserError, match=r"second continued from first, .*: --only first --only second"):
        world.train(recipe, only=["first"], fresh=True)
    assert (world.weights("first"), world.weights("second"), world.numbers()) == before


def test_rows_of_another_stage_survive_going_on(world: World) -> None:
    """Two stages go on from one; the first falls over, the second is finished, then the first goes on."""
    both = {"start_from": "first", "validation": {}, "checkpoint": {"every": 2}}
    recipe = world.recipe(stages={"first": {"steps": 2}, "second": {"steps": 5, **both}, "third": {"steps": 3, **both}})
    assert world.train(recipe, only=["first"]) == 0
    with pytest.raises(Stop):
        train(recipe, only=["second"], sink=_falling(3))
    assert world.train(recipe, only=["third"]) == 0
    assert world.train(recipe) == 0
    steps = {(row["stage"], row["step"]) for row in world.rows() if row["axis"] == "train"}
    assert len([row for row in world.rows() if row["axis"] == "train"]) == len(steps) == 2 + 5 + 3


def test_a_fresh_start_that_fails_late_puts_the_run_back(world: World) -> None:
    """As W&B or an engine may, after the stage was announced."""
    assert world.train(world.recipe({"steps": 2})) == 0
    before = world.weights(), world.numbers()

    def refuse(event: Event) -> None:
        if isinstance(event, StageStarted):
            raise UserError("no key")

    with pytest.raises(UserError, match="no key"):
        train(world.recipe({"steps": 3}), fresh=True, sink=refuse)
    assert (world.weights(), world.numbers()) == before


@pytest.mark.parametrize("fresh", [False, True])
def test_a_recipe_that_lies_in_the_run_folder_is_not_overwritten(world: World, fresh: bool) -> None:
    (world.run / "evaluations").mkdir(parents=True)
    (world.run / "recipe.yaml").write_text("# mine\n")
    with pytest.raises(UserError, match=r"recipe\.yaml would be overwritten .*; set run\.dir to another folder"):
        world.train(world.recipe(), fresh=fresh)
    assert (world.run / "recipe.yaml").read_text() == "# mine\n" and (world.run / "evaluations").is_dir()


def test_data_that_changed_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"say {i}", "response": str(i)} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = world.recipe({"steps": 4, "data": {"source": str(path)}, "checkpoint": {"every": 2}, "validation": {}})

    def stop(event: Event) -> None:
        if isinstance(event, Progressed) and event.done == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(recipe, sink=stop) == 0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    with pytest.raises(UserError, match="the data of stage sft are not those it was trained on until step 2"):
        world.train(recipe)


@pytest.mark.parametrize("record", ['{"digest": ', "{}", "[]"])
def test_a_folder_whose_record_is_broken(world: World, record: str) -> None:
    world.run.mkdir()
    (world.run / "run.json").write_text(record)
    with pytest.raises(UserError, match=r"run\.json is broken; start over with --fresh"):
        world.train(world.recipe())
    assert world.train(world.recipe({"steps": 1}), fresh=True) == 0


def test_two_processes_in_one_folder(world: World) -> None:
    world.run.mkdir()
    with open(world.run / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process is working in .*; wait for it"):
            world.train(world.recipe())
    assert world.train(world.recipe({"steps": 1})) == 0


@pytest.mark.parametrize("place", ["below a file", "proc"])
def test_a_folder_that_cannot_be_written(world: World, place: str) -> None:
    (world.folder / "file").write_text("")
    world.run = world.folder / "file" / "run" if place == "below a file" else Path("/proc/lemma/run")
    with pytest.raises(UserError, match=r"the run folder .* cannot be written .*; set run.dir to a folder of yours"):
        world.train(world.recipe())


def test_run_json_names_the_kernel_of_attention(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed("flash-attn-4", "4.0.0", tmp_path / "packages", monkeypatch)
    world.train(world.recipe({"steps": 1}))
    assert json.loads((world.run / "run.json").read_text())["flash-attn-4"] == "4.0.0"


def test_a_model_that_is_not_there_leaves_no_folder(world: World) -> None:
    with pytest.raises(UserError, match="there is no model folder"):
        world.train(world.recipe(path=str(world.folder / "nowhere")))
    assert not world.run.exists()


def test_what_is_waited_for_is_told_and_ends(world: World) -> None:
    assert world.train(world.recipe({"steps": 2})) == 0
    told = [event.what for event in world.events if isinstance(event, Awaited)]
    assert told[:4] == ["loading the model", "", "reading the data", ""]
    assert told[4:] == ["evaluating (validation)", ""] * (len(told[4:-1]) // 2) + [
        "writing the last checkpoint and the model"
    ]
    assert len(told) > 5


# --- going on --------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def _falling(step: int) -> Sink:
    def sink(event: Event) -> None:
        if isinstance(event, Progressed) and event.done == step:
            raise Stop

    return sink


def stop_after(step: int, recipe: Recipe) -> None:
    """Train until the row of a step is written, then fall over as a crash would, without saving."""
    with pytest.raises(Stop):
        train(recipe, sink=_falling(step))


def test_a_run_that_fell_over_ends_as_if_it_had_not(finished: World, world: World) -> None:
    recipe = world.recipe()
    stop_after(5, recipe)
    assert [row["step"] for row in world.rows() if row["axis"] == "train"] == [1, 2, 3, 4, 5]
    with open(world.run / "metrics.jsonl", "a") as handle:
        handle.write('{"stage": "sft", "step": 6, "axis": "tr')
    assert world.train(recipe) == 0
    assert world.numbers() == finished.numbers() and world.weights() == finished.weights()
    started = next(event for event in world.events if isinstance(event, StageStarted))
    assert (started.step, started.resumed) == (4, True)
    (ended,) = [event for event in world.events if isinstance(event, StageEnded)]
    assert ended.resumed


def test_a_broken_checkpoint_costs_only_time(finished: World, world: World) -> None:
    recipe = world.recipe()
    stop_after(5, recipe)
    newest = world.run / "stages" / "sft" / "checkpoints" / "step-00000004" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert world.train(recipe) == 0
    warnings = [event.text for event in world.events if isinstance(event, Said) and event.level == "warning"]
    assert warnings == [
        "the checkpoint of step 4 is broken (tensors.safetensors is not what was written); using an earlier one"
    ]
    assert world.numbers() == finished.numbers() and world.weights() == finished.weights()


def test_a_full_disk_ends_the_run_with_a_sentence(
    finished: World, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "checkpoint.mid_write:2:ENOSPC")
    recipe = world.recipe()
    with pytest.raises(UserError, match=r"No space left on device\); the one of step 2 is intact; make room"):
        world.train(recipe)
    monkeypatch.delenv("LEMMA_FAULT")
    assert world.train(recipe) == 0
    assert world.numbers() == finished.numbers() and world.weights() == finished.weights()


def test_no_room_for_the_final_model(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = world.recipe({"steps": 2, "validation": {}})

    def full(*_: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lemma.models.policy.Policy.save", full)
        with pytest.raises(
            UserError, match=r"the model of stage sft could not be written .*No space left.*; make room"
        ):
            world.train(recipe)
    assert not world.final().exists()
    assert world.train(recipe) == 0 and world.final().is_dir()


def test_the_checkpoint_of_another_model(world: World) -> None:
    """The folder that the recipe names holds another model than before."""
    model = world.folder / "model"

    def put(hidden: int) -> None:
        shape = TinyOptions(hidden=hidden, layers=1, feed_forward=32, context=96)
        build_policy(ModelOptions(tiny=shape), torch.device("cpu"), 0).save(model)

    put(16)
    recipe = world.recipe(path=str(model))
    stop_after(5, recipe)
    put(24)
    with pytest.raises(UserError, match=r"the checkpoint is of another model: .* start over with --fresh"):
        world.train(recipe)


def test_threads_are_those_of_the_first_start(world: World) -> None:
    before = torch.get_num_threads()
    try:
        recipe = world.recipe({"steps": 1, "validation": {}})
        assert world.train(recipe) == 0
        facts = json.loads((world.run / "run.json").read_text())
        (world.run / "run.json").write_text(json.dumps(facts | {"threads": 2}))
        assert world.train(recipe) == 0 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_signals_finish_the_step_save_and_say_how_to_go_on(finished: World, tmp_path: Path) -> None:
    """Real processes under the real command, signalled after their second step; both go on here, to the same end."""
    processes: list[tuple[World, Python]] = []
    for name in ("SIGTERM", "SIGINT"):
        world = World(tmp_path / name)
        world.folder.mkdir()
        world.recipe()
        words = ["-m", "lemma", "train", world.folder / "recipe.yaml"]
        environment = os.environ | {"LEMMA_FAULT": f"stage.step_end:2:{name}"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append((world, Python(words, env=environment, **pipes)))
    for world, process in processes:
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output
        assert "sft: stopped after saving; the same command resumes from here" in " ".join(output.split())
        assert world.rows()[-1]["step"] == 3 and not world.final().exists()
        assert (world.run / "stages" / "sft" / "checkpoints" / "step-00000003").is_dir()
        assert world.train(world.recipe()) == 0
        started = next(event for event in world.events if isinstance(event, StageStarted))
        assert (started.step, started.resumed) == (3, True)
        assert world.numbers() == finished.numbers() and world.weights() == finished.weights()


def test_a_signal_between_saving_and_stopping(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the end of the next step: what is said to be saved is saved."""
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "stage.step_end:1:SIGTERM")
    assert world.train(world.recipe({"validation": {}})) == 0
    assert world.said() == ["sft: stopped after saving; the same command resumes from here"]
    store = world.run / "stages" / "sft" / "checkpoints"
    assert [path.name for path in store.iterdir()] == ["step-00000002"]


def test_a_stop_asked_for_in_the_last_step_is_honoured_before_the_next_stage(world: World) -> None:
    recipe = world.recipe(stages=TWO)
    before = signal.getsignal(signal.SIGTERM)  # Ray, in another test of this process, leaves one of its own

    def sink(event: Event) -> None:
        world.events.append(event)
        if isinstance(event, Progressed) and (event.what, event.done) == ("first", 3):
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(recipe, sink=sink) == 0
    assert world.said() == ["first: done; stopped before the next stage; the same command resumes from here"]
    assert world.final("first").is_dir() and not (world.run / "stages" / "second").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    assert world.train(recipe) == 0
    assert world.said() == ["first: done already", f"the model is in {world.final('second')}"]
