"""A model is improved by DPO on its own graded samples: supervised learning, sampling into a journal, preference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
