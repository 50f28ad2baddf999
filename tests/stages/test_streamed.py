"""Data sets larger than memory: read a row at a time, learnt from files."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.recipe import load_recipe
from lemma.stages.supervised import TrainingData
from lemma.stages.token_store import StoredTokens, stored
from tests.stages.sft_world import World


def rows(path: Path, count: int) -> str:
    said = [
        {"prompt": f"{n} + 1 ?", "completion": f" {n} + 1 = {n + 1} </think> <answer> {n + 1} </answer>"}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in said))
    return str(path)


def stage(source: str, **more: Any) -> dict[str, Any]:
    return {"data": {"source": source, **more}, "steps": None, "epochs": 2, "validation": {"every": 3}}


def test_a_streamed_run_learns_what_one_in_memory_learns(tmp_path: Path) -> None:
    source = rows(tmp_path / "rows.jsonl", 20)
    worlds = []
    for name, streaming in (("memory", False), ("streamed", True)):
        (tmp_path / name).mkdir()
        worlds.append(World(tmp_path / name))
        assert worlds[-1].train(worlds[-1].recipe(stage(source, streaming=streaming))) == 0
    assert worlds[0].weights() == worlds[1].weights()
    assert worlds[0].numbers() == worlds[1].numbers()


def test_a_stopped_run_goes_on_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = World(tmp_path / "whole"), World(tmp_path / "parts")
    for world in (whole, parts):
        world.folder.mkdir()
    options = stage(rows(tmp_path / "rows.jsonl", 20), streaming=True) | {"validation": {"share": 0.3, "every": 2}}
    assert whole.train(whole.recipe(options)) == 0
    recipe = parts.recipe(options)

    def stop(event: Any) -> None:
        if getattr(event, "done", 0) == 3:
            raise KeyboardInterrupt

    from lemma.runs.run import train

    with pytest.raises(KeyboardInterrupt):
        train(recipe, sink=stop)
    folder = parts.run / "stages" / "sft" / "tokens" / "learnt"
    before = (folder / "ids.bin").stat().st_mtime_ns
    assert parts.train(recipe) == 0
    assert (folder / "ids.bin").stat().st_mtime_ns == before and parts.weights() == whole.weights()
    held = StoredTokens(parts.run / "stages" / "sft" / "tokens" / "held_out")
    learnt = {tuple(one.ids_T) for one in StoredTokens(folder)}
    assert len(held) and not learnt & {tuple(one.ids_T) for one in held} and len(held) + len(learnt) == 20


def test_sequences_stay_on_disk(tmp_path: Path) -> None:
    count, size = 2000, 2000

    def build() -> Any:
        for number in range(count):
            yield Trajectory(np.full(size, number), np.arange(size) > 0)

    tracemalloc.start()
    try:
        found = stored(tmp_path / "tokens", {"a": 1}, build())
        data = TrainingData(found, per_step=4, seed=1, name="sft", shuffle=True)
        seen = [int(one.ids_T[0]) for index in range(data.steps_per_epoch) for one in data.batch(index)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sorted(seen) == list(range(count)) and seen != sorted(seen) and data.tokens == count * size
    assert peak < count * size  # all ids in memory take eight times that


def test_files_are_made_again_for_another_key_and_only_then(tmp_path: Path) -> None:
    def one(number: int) -> list[Trajectory]:
        return [Trajectory(np.array([1, number]), np.array([False, True]))]

    assert stored(tmp_path / "t", {"a": 1}, one(5))[0].ids_T.tolist() == [1, 5]
    assert stored(tmp_path / "t", {"a": 1}, one(6))[0].ids_T.tolist() == [1, 5]
    again = stored(tmp_path / "t", {"a": 2}, one(6))
    assert again[0].ids_T.tolist() == [1, 6] and again[0].loss_mask_T.tolist() == [False, True]
    assert len(stored(tmp_path / "empty", {}, [])) == 0


@pytest.mark.parametrize("train_on", ["response", "all"])
def test_long_prompts_are_left_out_whatever_is_learnt(train_on: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    said = [
        {"prompt": f"{'1 + ' * (n % 2 * 9)}1 ?", "completion": " 2 </think> <answer> 2 </answer>"} for n in range(8)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in said))
    worlds = []
    for name, streaming in (("memory", False), ("streamed", True)):
        (tmp_path / name).mkdir()
        worlds.append(World(tmp_path / name))
        limited = stage(str(path), streaming=streaming, prompt_length={"max_tokens": 12}) | {"train_on": train_on}
        assert worlds[-1].train(worlds[-1].recipe(limited)) == 0
    assert len(StoredTokens(tmp_path / "streamed" / "run" / "stages" / "sft" / "tokens" / "learnt")) == 4
    assert worlds[0].weights() == worlds[1].weights()
    assert any("4 prompts are longer than the 12 tokens of prompt_length" in text for text in worlds[1].said())


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    source = rows(tmp_path / "rows.jsonl", 4)
    for more, sentence in (
        ({"fraction": 0.5}, "count in place of fraction"),
        ({"prompt_length": {"percentile": 0.9}}, "max_tokens in place of percentile"),
    ):
        with pytest.raises(UserError, match=sentence):
            world.recipe(stage(source, streaming=True, **more))
    other = {"kind": "rl", "data": {"source": source, "streaming": True}}
    (tmp_path / "rl.yaml").write_text(json.dumps({"stages": {"grpo": other}}))
    with pytest.raises(UserError, match="is for supervised stages"):
        load_recipe(tmp_path / "rl.yaml")
    with pytest.raises(UserError, match="keeps whole sequences; write `packing: borders`"):
        world.recipe(stage(source, streaming=True) | {"packing": "stream", "max_length": 16})
