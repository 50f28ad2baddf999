"""The supervised stage from a recipe to a finished model, in this process."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from peft import PeftModel
from safetensors.torch import load_file

from lemma.core import faults
from lemma.core.errors import UserError
from lemma.core.events import Event, Measured, Progressed, Said, StageEnded, StageStarted
from lemma.core.types import Trajectory
from lemma.data.load import load_demonstrations
from lemma.formats.encode import encode_demonstration, pack_documents
from lemma.models.load import build_policy
from lemma.models.options import ModelOptions, TinyOptions
from lemma.models.tiny import tiny_tokenizer
from lemma.recipe import Recipe, load_recipe
from lemma.training import supervised
from lemma.training.run import train
from lemma.training.supervised import TrainingData

STAGE: dict[str, Any] = {
    "kind": "supervised",
    "steps": 6,
    "data": {"arithmetic": {"count": 60, "operations": 2}},
    "batch": {"sequences": 6, "token_budget": 128},
    "optim": {"lr": 2e-3, "warmup": 2},
    "validation": {"share": 0.2, "every": 2},
    "checkpoint": {"every": 3, "keep": 2},
}


class World:
    """Recipes in a folder of their own, and what their runs said."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run = folder / "run"
        self.events: list[Event] = []

    def recipe(
        self, changes: dict[str, Any] | None = None, stages: dict[str, Any] | None = None, **model: Any
    ) -> Recipe:
        """One stage `sft` with `changes`, or the given stages."""
        wanted = stages or {"sft": changes or {}}
        content = {
            "run": {"dir": str(self.run), "seed": 3, "threads": 1, "device": "cpu", "tensorboard": False},
            "model": {"tiny": {"hidden": 32, "layers": 2, "feed_forward": 48, "context": 96}, **model},
            "format": {"name": "r1_zero", "preamble": False},
            "stages": {name: STAGE | stage for name, stage in wanted.items()},
        }
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return load_recipe(path)

    def train(self, recipe: Recipe, **options: Any) -> int:
        self.events = []
        return train(recipe, sink=self.events.append, **options)

    def said(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Said)]

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def numbers(self) -> list[dict[str, Any]]:
        """The rows without timings, which alone may differ between two runs."""
        return [{key: value for key, value in row.items() if key != "timings"} for row in self.rows()]

    def final(self, stage: str = "sft") -> Path:
        return self.run / "stages" / stage / "final"

    def weights(self, stage: str = "sft") -> bytes:
        return (self.final(stage) / "model.safetensors").read_bytes()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A run of six steps that nothing disturbed."""
    world = World(tmp_path_factory.mktemp("finished"))
    assert world.train(world.recipe()) == 0
    return world


# --- what a run leaves behind ----------------------------------------------------------------------------------------


def test_rows_of_metrics(finished: World) -> None:
    rows = finished.rows()
    train_rows = [row for row in rows if row["axis"] == "train"]
    eval_rows = [row for row in rows if row["axis"] == "eval"]
    assert [row["step"] for row in train_rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in eval_rows] == [2, 4, 6]
    assert {row["stage"] for row in rows} == {"sft"}
    assert train_rows[-1]["loss"] < train_rows[0]["loss"]
    assert eval_rows[-1]["validation/loss"] < eval_rows[0]["validation/loss"]
    assert [row["lr"] for row in train_rows] == [1e-3, *[2e-3] * 5]
    assert [row["epoch"] for row in train_rows] == pytest.approx([k / 8 for k in range(1, 7)])
    for row in train_rows:
        assert row["updated"] == 1.0 and 0 < row["trained_tokens"] < row["tokens"]
        assert {"seconds", "update_seconds", "data_seconds", "tokens_per_second"} <= row["timings"].keys()


def test_events(finished: World) -> None:
    kinds = [type(event) for event in finished.events]
    assert kinds[0] is StageStarted and kinds[-2:] == [StageEnded, Said]
    assert finished.said() == [f"the model is in {finished.final()}"]
    assert kinds.count(Measured) == 9 and kinds.count(Progressed) == 6
    started = finished.events[0]
    assert isinstance(started, StageStarted)
    assert (started.stage, started.step, started.total, started.resumed) == ("sft", 0, 6, False)


def test_the_folder(finished: World) -> None:
    assert yaml.safe_load((finished.run / "recipe.yaml").read_text())["run"]["seed"] == 3
    facts = json.loads((finished.run / "run.json").read_text())
    assert facts["threads"] == 1 and facts["torch"] == torch.__version__
    store = finished.run / "stages" / "sft" / "checkpoints"
    assert sorted(path.name for path in store.iterdir()) == ["best.json", "step-00000004", "step-00000006"]
    assert json.loads((store / "best.json").read_text())["step"] == 6
    done = json.loads((finished.run / "stages" / "sft" / "done.json").read_text())
    assert done["step"] == 6 and done["examples"] == 48


def test_the_final_model_is_a_plain_one(finished: World) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(finished.final())
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished.final())
    assert tokenizer.chat_template
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "eva has 13 pens ."}], tokenize=False, add_generation_prompt=True
    )
    assert "eva has 13 pens ." in prompt and prompt.rstrip().endswith("<think>")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
    last = finished.run / "stages" / "sft" / "checkpoints" / "step-00000006" / "tensors.safetensors"
    saved = load_file(last)["weight/model.norm.weight"]
    assert torch.equal(model.model.norm.weight.detach(), saved)


def test_the_same_recipe_gives_the_same_run(finished: World, world: World) -> None:
    torch.manual_seed(1234)
    assert world.train(world.recipe()) == 0
    assert world.numbers() == finished.numbers()
    assert world.weights() == finished.weights()


def test_a_finished_run_is_left_alone(finished: World) -> None:
    before = (finished.run / "metrics.jsonl").read_bytes()
    finished.events.clear()
    assert finished.train(finished.recipe()) == 0
    assert finished.said() == ["sft: done already", f"the model is in {finished.final()}"]
    assert (finished.run / "metrics.jsonl").read_bytes() == before


def test_an_adapter_is_saved_alone_and_merged(world: World) -> None:
    assert world.train(world.recipe({"optim": {"lr": 0.05}}, lora={"r": 4, "alpha": 8})) == 0
    ids = torch.arange(3, 43)[None]
    merged = transformers.AutoModelForCausalLM.from_pretrained(world.final() / "merged").eval()
    base = build_policy(world.recipe().model, torch.device("cpu"), 3).causal
    with torch.no_grad():
        untrained = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, world.final() / "adapter").eval()(input_ids=ids).logits
        both = merged(input_ids=ids).logits
    torch.testing.assert_close(both, adapted, rtol=1e-4, atol=1e-4)
    assert (both - untrained).abs().max().item() > 0.01
    for folder in ("adapter", "merged"):
        assert transformers.AutoTokenizer.from_pretrained(world.final() / folder).chat_template


# --- what is learnt --------------------------------------------------------------------------------------------------


def seen_by(
    world: World, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[Trajectory]], list[Trajectory]]:
    """The batches and the held-out trajectories of a run, which it keeps to itself otherwise."""
    batches: list[list[Trajectory]] = []
    held_out: list[Trajectory] = []
    step, evaluate = supervised.Learner.step, supervised.Learner.evaluate

    def watched_step(self: Any, items: Sequence[Trajectory], objective: Any) -> Any:
        batches.append(list(items))
        return step(self, items, objective)

    def watched_evaluate(self: Any, items: Sequence[Trajectory], objective: Any) -> Any:
        held_out[:] = items
        return evaluate(self, items, objective)

    monkeypatch.setattr(supervised.Learner, "step", watched_step)
    monkeypatch.setattr(supervised.Learner, "evaluate", watched_evaluate)
    assert world.train(recipe) == 0
    return batches, held_out


def contents(items: Sequence[Trajectory]) -> set[tuple[int, ...]]:
    return {tuple(item.ids_T.tolist()) for item in items}


def test_held_out_rows_are_never_learnt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, held_out = seen_by(world, world.recipe({"steps": None, "epochs": 2}), monkeypatch)
    assert len(held_out) == 12
    learnt = [item for batch in batches for item in batch]
    assert not contents(learnt) & contents(held_out)
    first, second = learnt[:48], learnt[48:]
    assert len(batches) == 16 and len(learnt) == 96
    assert contents(first) == contents(second) and len(contents(first)) == 48
    assert [i.problem_id for i in first] != [i.problem_id for i in second], "a new order for every epoch"


def test_masks_and_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = world.recipe({"steps": 1, "validation": {}})
    (batch,), held_out = seen_by(world, recipe, monkeypatch)
    assert held_out == []
    tokenizer = tiny_tokenizer()
    for item in batch:
        assert item.ids_T[-1] == tokenizer.eos_token_id and item.chosen_T[-1]
        start = int(item.chosen_T.argmax())
        assert item.chosen_T[start:].all()
        assert tokenizer.decode(item.ids_T[:start]).endswith("<think>")
        assert "</think> <answer>" in tokenizer.decode(item.ids_T[start:])


def test_stream_packing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of the stream, each with one token more, the label of its last: as `pack_documents` cuts it."""
    changes = {"packing": "stream", "max_length": 40, "steps": None, "shuffle": False, "validation": {}}
    recipe = world.recipe(changes)
    batches, _ = seen_by(world, recipe, monkeypatch)
    stage = recipe.stages["sft"]
    assert isinstance(stage, supervised.SupervisedOptions)
    tokenizer = tiny_tokenizer()
    demonstrations = load_demonstrations(stage.data, 3)
    documents = [encode_demonstration(recipe.format, item, tokenizer).ids_T for item in demonstrations]
    inputs, labels = pack_documents(documents, 40)
    pieces = [item for batch in batches for item in batch]
    assert len(pieces) == len(inputs) > 6
    np.testing.assert_array_equal(np.stack([piece.ids_T[:-1] for piece in pieces]), inputs)
    np.testing.assert_array_equal(np.stack([piece.ids_T[1:] for piece in pieces]), labels)
    assert all(piece.chosen_T[1:].all() for piece in pieces)


@pytest.mark.parametrize(
    ("changes", "steps", "examples"),
    [
        ({"steps": 3}, 3, 48),
        ({"steps": None}, 8, 48),
        ({"steps": None, "epochs": 0.5}, 4, 48),
        ({"steps": None, "unique_examples": 7}, 2, 7),
        ({"steps": 5, "unique_examples": 1, "validation": {}}, 5, 1),
        ({"steps": None, "epochs": 0.001}, 1, 48),
    ],
)
def test_epochs_steps_and_unique_examples(
    world: World, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], steps: int, examples: int
) -> None:
    batches, _ = seen_by(world, world.recipe(changes), monkeypatch)
    assert len(batches) == steps
    done = json.loads((world.run / "stages" / "sft" / "done.json").read_text())
    assert done["steps"] == steps and done["examples"] == examples
    assert len(contents([item for batch in batches for item in batch])) <= examples


def test_long_demonstrations_are_left_out_and_counted(world: World) -> None:
    lengths = _lengths(world)
    limit = int(np.median(lengths))
    assert world.train(world.recipe({"max_length": limit, "validation": {}, "steps": 1})) == 0
    long = sum(length > limit for length in lengths)
    assert 0 < long < 60
    assert f"{long} of 60 demonstrations are longer than {limit} tokens and were left out" in world.said()


def _lengths(world: World) -> list[int]:
    recipe = world.recipe()
    stage = recipe.stages["sft"]
    assert isinstance(stage, supervised.SupervisedOptions)
    tokenizer = tiny_tokenizer()
    return [len(encode_demonstration(recipe.format, d, tokenizer)) for d in load_demonstrations(stage.data, 3)]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "all too long": ({"max_length": 8}, "stage sft: every demonstration is longer than 8 tokens; raise max_length"),
    "pieces beyond the context": (
        {"packing": "stream", "max_length": 97},
        "stage sft: pieces of 97 tokens are longer than the model's 96; write `max_length: 96` or less",
    ),
    "not one piece": (
        {"packing": "stream", "max_length": 96, "unique_examples": 1},
        "tokens of data do not fill one piece of 96 tokens; lower max_length or use more data",
    ),
    "no prompt short enough": (
        {"data": STAGE["data"] | {"prompt_length": {"max_tokens": 2}}},
        "all 48 prompts are longer than 2 tokens; the shortest has 15; raise prompt_length.max_tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_data_that_cannot_be_learnt(world: World, name: str) -> None:
    changes, sentence = WRONG[name]
    with pytest.raises(UserError) as caught:
        world.train(world.recipe(changes))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_prompts_are_measured_as_they_will_be_read(world: World) -> None:
    """A verbatim prompt of the data set counts, not the one that the format would write."""
    rows = [{"prompt": "eva has " * k, "response": "13 pens ."} for k in (1, 30)]
    data = world.folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data": {"source": str(data), "prompt_length": {"max_tokens": 10}}, "validation": {}, "steps": 1}
    assert world.train(world.recipe(changes)) == 0
    assert json.loads((world.run / "stages" / "sft" / "done.json").read_text())["examples"] == 1


def test_rows_between_are_counted_in_the_rate(world: World) -> None:
    assert world.train(world.recipe({"log_every": 4, "validation": {}})) == 0
    rows = world.rows()
    assert [row["step"] for row in rows] == [4, 6]
    done = json.loads((world.run / "stages" / "sft" / "done.json").read_text())
    assert done["steps"] == 6
    for row, steps in zip(rows, (4, 2), strict=True):
        learnt = row["timings"]["tokens_per_second"] * row["timings"]["update_seconds"]
        assert learnt > row["tokens"] * (steps - 1)


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
    assert settings["base_model_name_or_path"] == str(world.final("first") / "merged")


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
        "restore the recipe, or start anew with --fresh"
    )
    assert world.weights() == before
    (world.run / "notes.txt").write_text("mine")
    assert world.train(other, fresh=True) == 0
    assert world.weights() != before and (world.run / "notes.txt").read_text() == "mine"
    assert [row["step"] for row in world.rows() if row["axis"] == "train"] == [1, 2]


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


def test_a_recipe_that_lies_in_the_run_folder_is_not_overwritten(world: World) -> None:
    world.run.mkdir()
    (world.run / "recipe.yaml").write_text("# mine\n")
    with pytest.raises(UserError, match=r"recipe\.yaml would be overwritten .*; set run\.dir to another folder"):
        world.train(world.recipe())
    assert (world.run / "recipe.yaml").read_text() == "# mine\n"


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


def test_a_folder_whose_record_is_broken(world: World) -> None:
    world.run.mkdir()
    (world.run / "run.json").write_text('{"digest": ')
    with pytest.raises(UserError, match=r"run\.json is broken; start anew with --fresh"):
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


def test_a_model_that_is_not_there_leaves_no_folder(world: World) -> None:
    with pytest.raises(UserError, match="there is no model folder"):
        world.train(world.recipe(path=str(world.folder / "nowhere")))
    assert not world.run.exists()


# --- going on --------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop_after(step: int, recipe: Recipe) -> None:
    """Train until the row of a step is written, then fall over as a crash would, without saving."""

    def sink(event: Event) -> None:
        if isinstance(event, Progressed) and event.done == step:
            raise Stop

    with pytest.raises(Stop):
        train(recipe, sink=sink)


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

    def full(*_: object) -> None:
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
    with pytest.raises(UserError, match=r"the checkpoint is of another model: .* start anew with --fresh"):
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
    processes: list[tuple[World, subprocess.Popen[str]]] = []
    for name in ("SIGTERM", "SIGINT"):
        world = World(tmp_path / name)
        world.folder.mkdir()
        world.recipe()
        command = [sys.executable, "-m", "lemma", "train", str(world.folder / "recipe.yaml")]
        environment = os.environ | {"LEMMA_FAULT": f"stage.step_end:2:{name}"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append((world, subprocess.Popen(command, env=environment, **pipes)))
    for world, process in processes:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert "sft: stopped after saving; the same command goes on from here" in " ".join(output.split())
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
    assert world.said() == ["sft: stopped after saving; the same command goes on from here"]
    store = world.run / "stages" / "sft" / "checkpoints"
    assert [path.name for path in store.iterdir()] == ["step-00000002"]


def test_a_stop_asked_for_in_the_last_step_is_honoured_before_the_next_stage(world: World) -> None:
    recipe = world.recipe(stages=TWO)

    def sink(event: Event) -> None:
        world.events.append(event)
        if isinstance(event, Progressed) and (event.what, event.done) == ("first", 3):
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(recipe, sink=sink) == 0
    assert world.said() == ["first: done; stopped before the next stage; the same command goes on from here"]
    assert world.final("first").is_dir() and not (world.run / "stages" / "second").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert world.train(recipe) == 0
    assert world.said() == ["first: done already", f"the model is in {world.final('second')}"]


# --- the order of the data -------------------------------------------------------------------------------------------


def test_the_batch_of_a_step_depends_on_the_step_alone() -> None:
    items = [Trajectory(np.arange(k + 2), np.arange(k + 2) > 0) for k in range(11)]

    def lengths(data: TrainingData, index: int) -> list[int]:
        return [len(item) for item in data.batch(index)]

    data = TrainingData(items, per_step=4, seed=1, name="sft", shuffle=True)
    forwards = [lengths(data, index) for index in range(9)]
    fresh = TrainingData(items, per_step=4, seed=1, name="sft", shuffle=True)
    assert [lengths(fresh, index) for index in reversed(range(9))] == forwards[::-1]
    assert [len(batch) for batch in forwards] == [4, 4, 3] * 3
    for epoch in range(3):
        assert sorted(n for batch in forwards[3 * epoch : 3 * epoch + 3] for n in batch) == list(range(2, 13))
    assert forwards[:3] != forwards[3:6]
    other = TrainingData(items, per_step=4, seed=2, name="sft", shuffle=True)
    assert [lengths(other, index) for index in range(9)] != forwards
    plain = TrainingData(items, per_step=4, seed=1, name="sft", shuffle=False)
    assert lengths(plain, 0) == lengths(plain, 3) == [2, 3, 4, 5]
