"""Every published recipe has a small twin: the same algorithm, rewards and format, trained here from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.core.events import silent
from lemma.recipe import Recipe, load_recipe
from lemma.rollouts import read_episodes
from lemma.runs.run import train
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from tests.recipes.published import REWARDS, STAGES

FOLDER = Path(__file__).resolve().parents[2] / "recipes"

EVERY = {"loss", "grad_norm", "lr", "reward/mean", "right", "format", "length/mean", "truncated", "groups/live"}
SAMPLED = {"surprisal", "mismatch/mean", "mismatch/max", "advantage/std"}
REUSED = SAMPLED | {"ratio/mean", "ratio/max", "kl/old"}
CLIPPED = REUSED | {"clip/low", "clip/high", "clip/region"}
MIXED = SAMPLED | {"entropy", "on/loss", "on/prob", "ratio/max", "clip/region"}
TAUGHT = MIXED | {"off_policy/reward", "off_policy/length/mean", "off_policy/prefix_share", "off/share"}
FIELDS = {
    "gsm8k_xml_grpo_qwen": SAMPLED | {"kl"},
    "gsm8k_xml_grpo_llama": SAMPLED | {"kl"},
    "math_r1_zero_grpo": CLIPPED,
    "math_r1_zero_grpo_no_clip": REUSED,
    "math_r1_zero_reinforce": SAMPLED,
    "math_r1_zero_reinforce_baseline": SAMPLED,
    "math_expert_iteration": {"nll"},
    "openmath_sft_dapo_grpo": SAMPLED | {"kl"},
    "numina_grpo": SAMPLED | {"kl"},
    "rlvr_gsm8k_grpo": CLIPPED | {"kl"},
    "numina_ppo": CLIPPED | {"kl_seen", "critic/loss", "critic/value_loss", "critic/value_clipped", "critic/grad_norm"},
    "luffy": TAUGHT | {"off/loss", "off/prob", "off/ratio"},
    "luffy_on_policy": MIXED,
    "luffy_rl_sft_loss": TAUGHT | {"sft/loss"},
    "luffy_sft_rl": MIXED,
}


def both(name: str) -> tuple[Recipe, Recipe]:
    return load_recipe(FOLDER / f"{name}.yaml"), load_recipe(FOLDER / "small" / f"{name}.yaml")


def rl(recipe: Recipe) -> tuple[str, ReinforcementOptions]:
    name, stage = list(recipe.stages.items())[-1]
    assert isinstance(stage, ReinforcementOptions)
    return name, stage


@pytest.mark.parametrize("name", STAGES)
def test_a_twin_differs_in_size_only(name: str) -> None:
    recipe, twin = both(name)
    assert list(twin.stages) == ["sft", *[stage for stage in recipe.stages if stage != "sft"]]
    (stage, large), (other, small) = rl(recipe), rl(twin)
    assert stage == other
    assert small.algorithm == large.algorithm
    assert small.rewards == large.rewards
    assert small.rollout == large.rollout.model_copy(update={"max_tokens": small.rollout.max_tokens})
    assert small.optim == large.optim.model_copy(update={"lr": small.optim.lr})
    assert (small.truncated, small.replace_dead) == (large.truncated, large.replace_dead)
    assert small.data.prompt_length.percentile == large.data.prompt_length.percentile
    assert twin.format.name == recipe.format.name
    assert twin.model.lora == recipe.model.lora
    assert twin.run.seed == recipe.run.seed


def run(name: str, folder: Path, **how: Any) -> list[dict[str, Any]]:
    """Train the twin; the rows of its metrics."""
    twin = load_recipe(FOLDER / "small" / f"{name}.yaml", [f"run.dir={folder}", "run.tensorboard=false"])
    assert train(twin, sink=silent, **how) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", STAGES)
def test_a_twin_trains(name: str, tmp_path: Path) -> None:
    stage, options = rl(both(name)[1])
    if name == "openmath_sft_dapo_grpo":
        run_sft_first(name, tmp_path)
    measured = [row for row in run(name, tmp_path) if row["stage"] == stage]
    rows = [row for row in measured if row["axis"] == "train"]
    evaluated = [row["step"] for row in measured if row["axis"] == "eval"]
    between = range(options.validation.every, (options.steps or 0), options.validation.every or 1)
    held_out = [0, *between, options.steps] if options.validation.share else []
    assert evaluated == ([0, options.steps] if options.eval.benchmarks else held_out)
    assert (tmp_path / "stages" / stage / "done.json").is_file()
    assert [row["step"] for row in rows] == list(range(1, (options.steps or 0) + 1))
    learnt = [row for row in rows if row["updates"]]
    assert sum(row["grad_norm"] > 0 for row in learnt) >= len(rows) / 2
    for row in learnt:
        assert FIELDS[name] | EVERY | {f"rewards/{reward}/mean" for reward in REWARDS[name]} <= set(row)
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["updated"] == 1 and row["updates"] <= options.algorithm.updates
    assert sum(row["format"] for row in rows) > 0.5 * len(rows), "SFT taught the format"
    if name == "luffy":
        check_traces(tmp_path / "stages/luffy/journal", rows)


def run_sft_first(name: str, folder: Path) -> None:
    """Either phase of the pipeline can be skipped; the second one without the first has nothing to start from."""
    with pytest.raises(UserError, match=r"stage sft is skipped, but .* holds no model"):
        run(name, folder, skip=["sft"])
    assert {row["stage"] for row in run(name, folder, skip=["grpo"])} == {"sft"}
    assert {row["stage"] for row in run(name, folder, skip=["sft"])} == {"sft", "grpo"}


def check_traces(journal: Path, rows: list[dict[str, Any]]) -> None:
    """One sample of eight is a teacher's, whole and right; nothing was generated for it."""
    for row in rows:
        samples = list(read_episodes(journal / f"step-{row['step']:06d}.jsonl"))
        taught = [sample for sample in samples if sample.given]
        assert len(samples) == 8 * len(taught) == 32
        assert all(sample.given == len(sample.ids) and sample.reward == 1.0 for sample in taught)
        assert row["generated_tokens"] == sum(len(sample.ids) for sample in samples if not sample.given)
