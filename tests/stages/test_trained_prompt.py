"""An evaluation of a run asks as its training did."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from lemma.api.model_format import format_of_model
from lemma.core.types import Message, Problem
from lemma.formats import make_format
from lemma.formats.encode import encode_prompt
from lemma.runs.prompt_file import trained_system
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
