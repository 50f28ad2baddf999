"""An evaluation of a run asks as its training did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lemma.api.model_of_run import format_of_model
from lemma.core.types import Message, Problem
from lemma.formats import make_format
from lemma.formats.encode import encode_prompt
from lemma.formats.format import trained_system
from tests.stages.sft_world import World

SYSTEM = "eva has pens ."


def rows(path: Path, *systems: str | None) -> str:
    said = [
        [{"role": "system", "content": system}] * (system is not None)
        + [{"role": "user", "content": f"{n} + 1 ?"}, {"role": "assistant", "content": f" {n} </think>"}]
        for n, system in enumerate(systems)
    ]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in said))
    return str(path)


def trained(tmp_path: Path, *systems: str | None, evaluate: bool = False) -> World:
    world = World(tmp_path)
    stage = {"steps": 1, "data": {"source": rows(tmp_path / "rows.jsonl", *systems)}, "validation": {}}
    if evaluate:
        benchmark = {"source": "arithmetic", "name": "sums", "arithmetic": {"count": 2, "operations": 1}}
        stage["eval"] = {"benchmarks": [benchmark], "at_start": False, "max_tokens": 4}
    recipe = world.recipe(stage)
    recipe = recipe.model_copy(update={"format": make_format({"name": "boxed", "template": "own"})})
    assert world.train(recipe) == 0
    return world


def test_the_system_message_of_the_rows_is_that_of_evaluations(tmp_path: Path) -> None:
    world = trained(tmp_path, *[SYSTEM] * 8, evaluate=True)
    tokenizer = AutoTokenizer.from_pretrained(world.final())
    spec = format_of_model(str(world.run), tokenizer)
    assert spec is not None and spec["system"] == SYSTEM
    learnt = Problem((Message("system", SYSTEM), Message("user", "1 + 1 ?")))
    bare = Problem((Message("user", "1 + 1 ?"),))
    boxed = make_format({"name": "boxed", "template": "own"})
    assert (
        encode_prompt(make_format(spec), bare, tokenizer).tolist() == encode_prompt(boxed, learnt, tokenizer).tolist()
    )
    text = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True)
    assert SYSTEM in text  # plain transformers asks so too
    [samples] = (world.run / "evaluations" / "sft").glob("step-*/results.json")
    assert SYSTEM in samples.read_text()


def test_rows_without_a_system_message_leave_the_formats(tmp_path: Path) -> None:
    world = trained(tmp_path, *[None] * 8)
    assert trained_system(world.run / "stages" / "sft") is None
    spec = format_of_model(str(world.run), AutoTokenizer.from_pretrained(world.final()))
    assert spec is not None and spec["system"] is None


def test_the_message_of_most_rows_counts_and_that_is_said(tmp_path: Path) -> None:
    world = trained(tmp_path, *[SYSTEM] * 6, "other", None)
    assert trained_system(world.run / "stages" / "sft") == SYSTEM
    assert any("3 different system messages or none; evaluations use the one of 6 of 8 rows" in s for s in world.said())


def verbatim(tmp_path: Path, prompts: list[str], evaluate: bool = True, streaming: bool = False) -> World:
    """A stage on rows with prompts of their own, in the format r1_zero."""
    world = World(tmp_path)
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": prompt, "response": f" {n} </think> <answer> {n} </answer>"} for n, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(path), "reader": "prompt_response", "verbatim": True, "streaming": streaming}
    stage: dict[str, Any] = {"steps": 1, "data": data, "validation": {}}
    if evaluate:
        benchmark = {"source": "arithmetic", "name": "sums", "arithmetic": {"count": 2, "operations": 1}}
        stage["eval"] = {"benchmarks": [benchmark], "at_start": False, "max_tokens": 4}
    recipe = world.recipe(stage)
    assert world.train(recipe.model_copy(update={"format": make_format("r1_zero")})) == 0
    return world


@pytest.mark.parametrize("streaming", [False, True])
def test_evaluations_ask_in_the_prompt_that_the_rows_bring(tmp_path: Path, streaming: bool) -> None:
    """Under other words than the format's own: those that the model has seen."""
    world = verbatim(
        tmp_path, [f"{SYSTEM}\nUser: {n} + 1 ?\nAssistant: <think>" for n in range(8)], streaming=streaming
    )
    folder = next((world.run / "evaluations" / "sft").glob("step-*"))
    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    assert all(one["prompt"] == f"{SYSTEM}\nUser: {one['question']}\nAssistant: <think>" for one in samples)
    tokenizer = AutoTokenizer.from_pretrained(world.final())
    assert (format_of_model(str(world.run), tokenizer) or {})["system"] == SYSTEM
    text = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True)
    assert text == f"{SYSTEM}\nUser: ?\nAssistant: <think>"


def test_the_formats_own_prompt_in_the_rows_changes_nothing(tmp_path: Path) -> None:
    own = make_format("r1_zero").own_system
    world = verbatim(tmp_path, [f"{own}\nUser: {n} ?\nAssistant: <think>" for n in range(8)], evaluate=False)
    assert trained_system(world.run / "stages" / "sft") is None


def test_prompts_of_another_format_are_said(tmp_path: Path) -> None:
    world = verbatim(tmp_path, [f"### Question: {n} ?" for n in range(8)], evaluate=False)
    assert any("8 of 8 rows bring prompts that the format r1_zero does not write" in text for text in world.said())


def test_a_later_stage_that_asks_under_another_instruction_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    path = tmp_path / "rows.jsonl"
    row = {"prompt": f"{SYSTEM}\nUser: 1 ?\nAssistant: <think>", "response": " 1 </think> <answer> 1 </answer>"}
    path.write_text((json.dumps(row) + "\n") * 8)
    own = {"steps": 1, "data": {"source": str(path), "reader": "prompt_response", "verbatim": True}, "validation": {}}
    stages = {"sft": own, "more": own, "other": {"steps": 1, "validation": {}}}
    recipe = world.recipe(stages=stages)
    assert world.train(recipe.model_copy(update={"format": make_format("r1_zero")})) == 0
    told = [text for text in world.said() if "was trained under the instruction of its rows" in text]
    assert len(told) == 1 and told[0].startswith("stage more ")
