"""A model is improved by DPO on its own graded samples: supervised learning, sampling into a journal, preference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from lemma.data.arithmetic import generate
from lemma.data.options import ArithmeticOptions
from lemma.engines import make_engine
from lemma.engines.base import Sampling
from lemma.engines.options import NativeOptions
from lemma.formats.encode import encode_prompt
from lemma.formats.r1_zero import R1Zero
from lemma.models.load import load_policy
from lemma.recipe import load_recipe
from lemma.rewards import make_reward
from lemma.rollouts import Ask, Journal, Judge, Sample, collect
from lemma.training.run import train
from tests.training.preference_world import RECIPES

RECIPE = """
run: {{dir: {folder}, seed: 1, threads: 1, device: cpu, tensorboard: false}}
model: {{path: {model}, tiny: {{hidden: 64, layers: 2, feed_forward: 128, context: 96}}}}
format: {{name: r1_zero, preamble: false}}
stages:
"""
SFT = """
  sft:
    steps: 300
    data: {arithmetic: {count: 4000, operations: 2, largest: 10, style: stepwise}}
    optim: {lr: 5e-3, schedule: linear, warmup: 20}
"""
DPO = """
  dpo:
    kind: preference
    algorithm: {{name: dpo, nll: 1.0}}
    data: {{source: "journal:{journal}", cache: {cache}}}
    journal: {{per_group: 2}}
    epochs: 2
    optim: {{lr: 1e-4, schedule: linear, warmup: 2}}
"""
FORMAT = R1Zero(preamble=False)
PROBLEMS = ArithmeticOptions(operations=2, largest=10)


def finished(folder: Path, name: str, recipe: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(recipe)
    assert train(load_recipe(path), sink=lambda event: None) == 0
    return folder / name / "stages" / name / "final"


def samples(model: Path, split: str, count: int, journal: Journal | None = None) -> list[Sample]:
    """Four graded samples for each of some problems."""
    policy = load_policy(str(model), "cpu")
    judge = Judge(FORMAT, [make_reward("accuracy")], policy.tokenizer)
    asks = [
        Ask((split, number), item.problem, encode_prompt(FORMAT, item.problem, policy.tokenizer), 4)
        for number, item in enumerate(generate(PROBLEMS, split, count=count))
    ]
    engine = make_engine(NativeOptions(), policy, 0)
    found = list(collect(engine, asks, Sampling(max_tokens=40, stop=FORMAT.stop), judge, journal=journal))
    engine.close()
    return found


@pytest.mark.slow
def test_dpo_on_its_own_samples_makes_a_model_better(tmp_path: Path) -> None:
    start = finished(tmp_path, "sft", RECIPE.format(folder=tmp_path / "sft", model="tiny") + SFT)
    journal = Journal(tmp_path / "journal.jsonl")
    samples(start, "validation", 1000, journal)
    journal.close()
    recipe = RECIPE.format(folder=tmp_path / "dpo", model=start)
    end = finished(tmp_path, "dpo", recipe + DPO.format(journal=journal.path, cache=tmp_path / "cache"))
    before, after = (np.mean([one.right for one in samples(model, "test", 300)]) for model in (start, end))
    assert 0.4 < before < 0.9, "neither hopeless nor perfect"
    assert after > before + 0.02, (before, after)


def test_only_samples_of_the_stages_before_are_learnt_from(tmp_path: Path) -> None:
    """A stage that is started anew, when a later one has sampled as well, learns from the same pairs."""
    content = yaml.safe_load((RECIPES / "own_samples_dpo.yaml").read_text())
    content["run"] |= {"dir": str(tmp_path / "run"), "tensorboard": False}
    stages = content["stages"]
    stages["dpo"] |= {"steps": 1, "validation": {}, "data": {"source": "journal", "cache": str(tmp_path / "cache")}}
    stages["sft"]["steps"], stages["sample"]["steps"] = 50, 1
    late = stages["sample"] | {"start_from": "sft", "rollout": {"temperature": 1.2, "max_tokens": 24}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content | {"stages": stages | {"a_late_one": late}}, sort_keys=False))

    def learnt() -> tuple[int, float]:
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        (loss,) = [row["loss"] for row in rows if row["stage"] == "dpo" and row["axis"] == "train"][-1:]
        return json.loads((tmp_path / "run" / "stages" / "dpo" / "done.json").read_text())["examples"], loss

    recipe = load_recipe(path)
    assert train(recipe, sink=lambda event: None) == 0
    first = learnt()
    assert list((tmp_path / "run" / "stages" / "a_late_one" / "journal").glob("*.jsonl"))
    assert train(recipe, only=["dpo"], fresh=True, sink=lambda event: None) == 0
    assert learnt() == first
