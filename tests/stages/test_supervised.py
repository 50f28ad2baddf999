"""The supervised stage: what a run leaves behind, and what is learnt from which data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from peft import PeftModel
from safetensors.torch import load_file

from lemma.core.errors import UserError
from lemma.core.events import Awaited, Measured, Progressed, Said, StageEnded, StageStarted
from lemma.core.types import Trajectory
from lemma.data.load_rows import load_demonstrations
from lemma.formats.encode import encode_demonstration, pack_documents
from lemma.learning.learner import Learner
from lemma.models.load_model import build_policy
from lemma.models.tiny import tiny_tokenizer
from lemma.recipe import Recipe
from lemma.stages import supervised
from lemma.stages.supervised import TrainingData
from tests.stages.sft_world import STAGE, World

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
    events = [event for event in finished.events if not isinstance(event, Awaited)]
    kinds = [type(event) for event in events]
    assert kinds[0] is StageStarted and kinds[-2:] == [StageEnded, Said]
    assert finished.said() == [f"the model is in {finished.final()}"]
    assert kinds.count(Measured) == 9 and kinds.count(Progressed) == 6
    started = events[0]
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
    step, evaluate = Learner.step, Learner.evaluate

    def watched_step(self: Any, items: Sequence[Trajectory], objective: Any) -> Any:
        batches.append(list(items))
        return step(self, items, objective)

    def watched_evaluate(self: Any, items: Sequence[Trajectory], objective: Any) -> Any:
        held_out[:] = items
        return evaluate(self, items, objective)

    monkeypatch.setattr(Learner, "step", watched_step)
    monkeypatch.setattr(Learner, "evaluate", watched_evaluate)
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
        assert item.ids_T[-1] == tokenizer.eos_token_id and item.loss_mask_T[-1]
        start = int(item.loss_mask_T.argmax())
        assert item.loss_mask_T[start:].all()
        assert tokenizer.decode(item.ids_T[:start]).endswith("<think>")
        assert "</think> <answer>" in tokenizer.decode(item.ids_T[start:])


def test_a_stream_is_validated_on_whole_demonstrations(world: World) -> None:
    """Which may be longer than its pieces."""
    assert (
        world.train(world.recipe({"packing": "stream", "max_length": 12, "steps": 2, "validation": {"share": 0.2}}))
        == 0
    )
    assert any(row["axis"] == "eval" for row in world.rows())


def test_a_small_memory_makes_small_packs_and_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lemma.runs.fitted.host_memory", lambda: 2**28)
    recipe = world.recipe({"steps": 1, "validation": {}, "batch": {"sequences": 4}})
    assert world.train(recipe) == 0
    assert Said("by the memory plan: 2048 tokens at a time") in world.events


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
    done = json.loads((world.run / "stages" / "sft" / "done.json").read_text())
    assert done["learnt_examples"] == len(pieces) and done["learnt_tokens"] == sum(map(len, pieces))
    np.testing.assert_array_equal(np.stack([piece.ids_T[:-1] for piece in pieces]), inputs)
    np.testing.assert_array_equal(np.stack([piece.ids_T[1:] for piece in pieces]), labels)
    assert all(piece.loss_mask_T[1:].all() for piece in pieces)


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
    items = [item for batch in batches for item in batch]
    assert len(contents(items)) <= examples
    assert done["learnt_examples"] == len(items) and done["learnt_tokens"] == sum(map(len, items))


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
        "all 60 prompts are longer than 2 tokens; the shortest has 15; raise prompt_length.max_tokens",
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


@pytest.mark.parametrize("how", ["share", "data"])
def test_held_out_prompts_are_measured_too(world: World, how: str) -> None:
    """Long prompts among the rows change nothing, neither what is learnt nor what is held out."""
    results = []
    for name, lengths in (("short", [1, 2, 3, 4]), ("mixed", [1, 30, 2, 31, 3, 32, 4, 33])):
        path = world.folder / f"{name}.jsonl"
        rows = [{"prompt": "eva has " * length, "response": "13 pens ."} for length in lengths]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"source": str(path), "prompt_length": {"max_tokens": 10}}
        changes = {"data": data, "validation": {"share": 0.5}} if how == "share" else {"validation": {"data": data}}
        assert world.train(world.recipe({"steps": 1, **changes}), fresh=True) == 0
        results.append(world.numbers())
    assert results[0] == results[1] and "validation/loss" in results[0][0]


def test_rows_between_are_counted_in_the_rate(world: World) -> None:
    assert world.train(world.recipe({"log_every": 4, "validation": {}})) == 0
    rows = world.rows()
    assert [row["step"] for row in rows] == [4, 6]
    done = json.loads((world.run / "stages" / "sft" / "done.json").read_text())
    assert done["steps"] == 6
    for row, steps in zip(rows, (4, 2), strict=True):
        learnt = row["timings"]["tokens_per_second"] * row["timings"]["update_seconds"]
        assert learnt > row["tokens"] * (steps - 1)


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
