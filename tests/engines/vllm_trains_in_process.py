"""Reinforcement learning with vLLM in the trainer's process, which is this one: it speaks with the weights of the last
update. Run by test_vllm.py behind vllm_in_process.py, in the same process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lemma.cli import main

RECIPE = """
run: {dir: run, device: cpu, threads: 1, tensorboard: false}
model: {path: tiny, tiny: {hidden: 64, layers: 2, feed_forward: 128, heads: 2, kv_heads: 1}}
format: {name: r1_zero, preamble: false}
stages:
  grpo:
    kind: rl
    algorithm: {name: grpo, group_size: 4}
    data: {source: arithmetic, arithmetic: {operations: 1, count: 50}}
    environment: {name: higher_lower, turns: 2}
    rewards: ["reward.py:evenness"]
    rollout: {max_tokens: 12, engine: {name: vllm, cache_gib: 0.05, sequences: 16}}
    batch: {problems: 4}
    steps: 3
    optim: {lr: 0.005}
"""
REWARD = """
def evenness(item):
    return float(sum(item.ids) % 2)
"""


def test_each_step_is_sampled_with_the_weights_of_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    assert main(["train", "recipe.yaml"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["axis"] == "train"]
    assert len(steps) == 3 and sum(row["updated"] for row in steps) == 3
    # The learner's weights moved by far more than this between the steps; the run itself stops above 1e-4.
    assert all(0 < row["mismatch/max"] < 1e-4 for row in steps)
    assert all(row["turns/mean"] > 1.5 for row in steps), "later turns are sampled by it too"
    surprisals = [row["surprisal"] for row in steps]
    assert max(surprisals) - min(surprisals) > 0.01
