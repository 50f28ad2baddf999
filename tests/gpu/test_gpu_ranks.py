"""Several processes on one GPU, over gloo: each has its own graphs and kernels, and all end with the same weights."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).resolve().parents[2]
REWARD = '''
def varies(item):
    """A number that depends on the sampled ids, so that every group has something to learn from."""
    return float(sum(item.ids) % 7)
'''


def content(folder: Path, device: str) -> dict[str, Any]:
    (folder / "reward.py").write_text(REWARD)
    supervised = {"kind": "supervised", "data": {"source": "arithmetic"}, "steps": 2, "batch": {"sequences": 8}}
    rl = {
        "kind": "rl", "algorithm": {"name": "grpo", "group_size": 4}, "data": {"source": "arithmetic"}, "steps": 3,
        "rewards": [f"{folder / 'reward.py'}:varies"], "rollout": {"max_tokens": 24}, "batch": {"problems": 8},
    }  # fmt: skip
    return {
        "run": {"dir": str(folder / "run"), "device": device, "deterministic": True, "tensorboard": False},
        "model": {"path": "tiny", "precision": "bf16" if device == "cuda" else "fp32"},
        "format": "r1_zero",
        "cluster": {"slots": 4},
        "stages": {"sft": supervised, "rl": rl},
    }


def trained(folder: Path, ranks: int, device: str = "cuda") -> tuple[dict[str, str], list[float]]:
    """The weights after each stage, by their digests, and the norms of all gradients."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content(folder, device)))
    command = [sys.executable, "-m", "lemma", "train", str(folder / "recipe.yaml"), "--ranks", str(ranks)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    stages = folder / "run" / "stages"
    weights = {
        str(path.relative_to(stages)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(stages.glob("*/final/*.safetensors"))
    }
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return weights, [row["grad_norm"] for row in rows if "grad_norm" in row]


def test_two_and_four_ranks_end_with_the_weights_of_one(tmp_path: Path) -> None:
    one, norms = trained(tmp_path / "one", 1)
    assert len(one) == 2 and all(norm > 0 for norm in norms), "something is learnt"
    for ranks in (2, 4):
        assert trained(tmp_path / str(ranks), ranks) == (one, norms)
