"""Real weights through every kind of stage, with an adapter: they learn, survive a death, and load elsewhere."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lemma.cli import main
from lemma.core.types import Message, Problem
from lemma.formats.encode import encode_prompt
from lemma.learning.checkpoint import CheckpointStore
from lemma.models.load_model import build_policy
from lemma.models.packing import Segments
from lemma.recipe import Recipe, load_recipe
from lemma.runs.run import train
from tests.real.rewards import DIGITS, LETTERS
from tests.runs.test_kill import Chain
from tests.runs.test_rl_kill import assert_same

FORMAT = {"name": "boxed", "system": "Be brief."}
Row = dict[str, Any]

WORKED: list[Row] = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = 7 pens.\n#### 7"},
    {"question": "Tom eats 2 of 9 figs. How many are left?", "answer": "9 - 2 = 7 figs.\n#### 7"},
    {"question": "A box holds 6 eggs. How many do 5 boxes hold?", "answer": "5 * 6 = 30 eggs.\n#### 30"},
    {"question": "Four friends share 12 nuts. How many each?", "answer": "12 / 4 = 3 nuts.\n#### 3"},
]
ASKED: list[Row] = [{"question": "Count to ten.", "answer": "10"}, {"question": "Write a year.", "answer": "1999"}]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Emptied afterwards: every run leaves a merged model of half a gigabyte."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("smollm2")
    yield path
    shutil.rmtree(path)


def write_recipe(folder: Path, model: Path, name: str, rows: list[Row], stage: Row, seed: int = 0) -> Path:
    """A recipe of one stage that learns from these rows."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "run": {"dir": str(folder / "run"), "seed": seed, "device": "cpu", "tensorboard": False},
        "model": {"path": str(model), "lora": {"r": 8, "merged": True}},
        "format": FORMAT,
        "stages": {name: {"data": {"source": str(folder / "rows.jsonl")}, **stage}},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(folder: Path, model: Path, name: str, rows: list[Row], stage: Row, seed: int = 0) -> list[Row]:
    """Train one stage; its rows of metrics."""
    assert train(load_recipe(write_recipe(folder, model, name, rows, stage, seed)), sink=lambda event: None) == 0
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


# --- imitating, and what comes out ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taught(kept: Path, smollm2: Path) -> Path:
    """A supervised run that sees all of its rows in every step."""
    stage = {"steps": 5, "batch": {"sequences": len(WORKED)}, "optim": {"lr": 1e-3}}
    run(kept, smollm2, "sft", WORKED, stage)
    return kept / "run"


@pytest.mark.slow
def test_supervised_steps_lower_the_loss(taught: Path) -> None:
    losses = [json.loads(line)["loss"] for line in (taught / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


def policy_logits(recipe: Recipe, stage: Path, ids_T: torch.Tensor) -> torch.Tensor:
    """What the policy that was trained says, with the adapter of its last checkpoint."""
    policy = build_policy(recipe.model, torch.device("cpu"), recipe.run.seed)
    saved = CheckpointStore(stage / "checkpoints", 1, print).newest()
    assert saved is not None
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            parameter.copy_(saved.tensors[f"weight/{name}"])
        hidden_TH = policy.hidden(ids_T, torch.arange(len(ids_T)), Segments((len(ids_T),), policy.device))
        return policy.head(hidden_TH)


def plain_logits(model: torch.nn.Module, ids_T: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids_T[None]).logits[0]


@pytest.mark.slow
def test_plain_transformers_and_peft_load_what_was_trained(taught: Path, smollm2: Path) -> None:
    from peft import PeftModel

    recipe, stage = load_recipe(taught / "recipe.yaml"), taught / "stages" / "sft"
    asked = WORKED[0]["question"]
    tokenizer = AutoTokenizer.from_pretrained(stage / "final" / "merged")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True)["input_ids"]
    problem = Problem((Message("user", asked),))
    assert ids == encode_prompt(recipe.format, problem, AutoTokenizer.from_pretrained(smollm2)).tolist()

    ids_T = torch.tensor(ids)
    trained = policy_logits(recipe, stage, ids_T)
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    before = plain_logits(base, ids_T)
    adapted = plain_logits(PeftModel.from_pretrained(base, stage / "final" / "adapter"), ids_T)
    merged = plain_logits(AutoModelForCausalLM.from_pretrained(stage / "final" / "merged"), ids_T)
    assert (before - trained).abs().max() > 1
    # Logits reach 37, and a merged matrix is rounded once more.
    torch.testing.assert_close(adapted, trained, atol=1e-3, rtol=0)
    torch.testing.assert_close(merged, trained, atol=1e-3, rtol=0)
    assert main(["export", str(taught), "--to", str(taught / "exported")]) == 0
    one, other = (load_file(place / "model.safetensors") for place in (taught / "exported", stage / "final" / "merged"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- learning from samples -------------------------------------------------------------------------------------------


def rollouts(group: int, reward: str, algorithm: str = "grpo", **more: Any) -> Row:
    """A stage of short samples."""
    return {
        "algorithm": {"name": algorithm, "group_size": group, **more},
        "rewards": [reward],
        "rollout": {"max_tokens": 6},
        "batch": {"problems": 2},
        "optim": {"lr": 1e-3},
        "checkpoint": {"every": 1},
    }


@pytest.mark.slow
def test_five_steps_of_grpo_raise_a_reward(folder: Path, smollm2: Path) -> None:
    """Over seeds 0, 1 and 2 the reward rises by 0.51, 0.89 and 0.52."""
    rows = run(folder, smollm2, "grpo", ASKED, {"steps": 5, **rollouts(6, DIGITS)})
    rewards = [row["reward/mean"] for row in rows]
    assert len(rewards) == 5
    assert rewards[-1] > rewards[0] + 0.25


@pytest.mark.slow
def test_a_death_in_the_second_step_changes_nothing(folder: Path, smollm2: Path) -> None:
    """The second process has the first step's checkpoint, and samples the second step from its beginning."""
    chains = []
    for name in ("undisturbed", "killed"):
        recipe = write_recipe(folder / name, smollm2, "rl", ASKED, {"kind": "rl", "steps": 2, **rollouts(2, LETTERS)})
        chains.append(Chain(recipe, folder / name / "run" / "metrics.jsonl"))
    undisturbed, killed = chains
    assert killed.die_at("rollouts.sampled:6"), "each step samples four"
    assert killed.last_step() == 1
    for chain in chains:
        process = chain.start()
        assert process.wait(500) == 0
    rows, _ = assert_same(killed, undisturbed)
    assert [row["updates"] for row in rows] == [1, 1]


# --- one step of the others ------------------------------------------------------------------------------------------

PAIRS: list[Row] = [
    {"prompt": "Name a color.", "chosen": "Blue.", "rejected": "I like all colors."},
    {"prompt": "Name a fruit.", "chosen": "A pear.", "rejected": "There are many fruits."},
]
JUDGED: list[Row] = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]
TRACED: list[Row] = [
    {"id": str(number), "dataset": "real", "problem": row["question"], "answer": row["answer"], "target": "Ten."}
    for number, row in enumerate(ASKED)
]
PREFERENCE: Row = {"batch": {"examples": 4}, "optim": {"lr": 1e-3}}


@dataclass(frozen=True)
class Step:
    """What to learn from, how, and what a first step must say."""

    rows: list[Row]
    stage: Row
    says: Callable[[Row], bool]


STEPS = {
    "dpo": Step(PAIRS, PREFERENCE, lambda row: row["loss"] == pytest.approx(math.log(2)) and row["kl"] == 0),
    "kto": Step(JUDGED, PREFERENCE, lambda row: row["loss"] == pytest.approx(0.5) and row["kl"] == 0),
    "ppo": Step(ASKED, rollouts(2, LETTERS, "ppo", epochs=1), lambda row: row["critic/grad_norm"] > 0),
    "luffy": Step(TRACED, rollouts(3, LETTERS, "luffy"), lambda row: 0 < row["off/share"] < 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of(name: str, folder: Path, smollm2: Path) -> None:
    step = STEPS[name]
    (metrics,) = run(folder, smollm2, name, step.rows, {"steps": 1, **step.stage})
    assert all(math.isfinite(value) for value in metrics.values() if isinstance(value, float))
    assert step.says(metrics) and metrics["grad_norm"] > 0
    adapter = load_file(folder / "run" / "stages" / name / "final" / "adapter" / "adapter_model.safetensors")
    outer = [tensor for key, tensor in adapter.items() if "lora_B" in key]
    assert outer and all(tensor.any() and tensor.isfinite().all() for tensor in outer), "they begin as zeros"
