"""Reinforcement learning with vLLM in the trainer's process: it speaks with the weights of the last update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lemma.engines.protocol import EngineError
from lemma.engines.vllm.versions import installed, judge

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


def test_each_step_is_sampled_with_the_weights_of_the_last(tmp_path: Path) -> None:
    try:
        judge(installed())
    except EngineError as error:
        is_excused = "+cpu" not in torch.__version__ or sys.platform != "linux"
        pytest.skip(f"{'needs vLLM' if is_excused else 'vLLM is missing'}: {error}")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "vllm-cache")}
    done = subprocess.run(
        [sys.executable, "-m", "lemma", "train", "recipe.yaml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["axis"] == "train"]
    assert len(steps) == 3 and sum(row["updated"] for row in steps) == 3
    # The learner's weights moved by far more than this between the steps; the run itself stops above 1e-4.
    assert all(0 < row["mismatch/max"] < 1e-4 for row in steps)
    assert all(row["turns/mean"] > 1.5 for row in steps), "later turns are sampled by it too"
    surprisals = [row["surprisal"] for row in steps]
    assert max(surprisals) - min(surprisals) > 0.01
