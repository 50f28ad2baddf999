"""Hashes of the metrics of small runs, to show that a code change leaves every number as it was.

    python -m benchmarks.metric_hashes > after.txt

Run it in a work tree of the commit before the change and in one of the commit after it, on the same machine, and
compare the two files. Numbers that depend on time are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from lemma.recipe import load_recipe
from lemma.runs.run import train

SMALL = Path(__file__).resolve().parents[1] / "recipes" / "small"
TIMED = ("timings", "held_by", "bottleneck", "time")


def with_algorithm(options: str) -> tuple[str, list[str]]:
    """The recipe of GRPO with another algorithm."""
    return "math_r1_zero_grpo", [f"stages.grpo.algorithm={{{options}, group_size: 4}}"]


RUNS: dict[str, tuple[str, list[str]]] = {
    "sft": ("math_sft", []),
    "grpo": ("math_r1_zero_grpo", []),
    "grpo with a KL": ("openmath_sft_dapo_grpo", []),
    "ppo": ("numina_ppo", []),
    "luffy": ("luffy", []),
    "luffy, imitating": ("luffy_rl_sft_loss", []),
    "dpo": ("dpo", []),
    "kto": ("kto", []),
    "cpo": ("cpo", []),
    "simpo": ("simpo", []),
    "orpo": ("orpo", []),
    "expert_iteration": ("math_expert_iteration", []),
    "reinforce": ("math_r1_zero_reinforce", []),
    "reinforce_baseline": ("math_r1_zero_reinforce_baseline", []),
    "dapo": with_algorithm("name: dapo, mini_batches: 2, mismatch_cap: 2"),
    "dr_grpo": with_algorithm("name: dr_grpo, entropy_target: 2.0"),
    "gspo": with_algorithm("name: gspo, epochs: 2, kl: 0.1, kl_by_ratio: true"),
    "cispo": with_algorithm("name: cispo, epochs: 2, top_entropy: 0.5"),
    "loop": with_algorithm("name: loop, least_advantage: 0.3"),
    "rloo": with_algorithm("name: rloo, reward_kl: 0.1, standardise: true, epochs: 2"),
    "reinforce, whitened": with_algorithm("name: reinforce, whiten: true, gamma: 0.9, entropy: 0.01"),
    "sapo": with_algorithm("name: grpo, gain: sapo, epochs: 2"),
    "vespo": with_algorithm("name: grpo, gain: vespo, epochs: 2, scale: batch"),
    "gdpo": with_algorithm("name: grpo, each_reward: {r1_zero: 2}"),
}


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in TIMED}


def hash_of(recipe: str, overrides: list[str]) -> str:
    """A hash of all rows of metrics of one run."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"run.dir={folder}/run"
        loaded = load_recipe(SMALL / f"{recipe}.yaml", [*overrides, place, "run.tensorboard=false"])
        assert train(loaded, sink=lambda event: None) == 0
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [without_time(json.loads(line)) for line in lines]
    assert rows
    return hashlib.blake2b(json.dumps(rows, sort_keys=True).encode(), digest_size=12).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"which runs; default all: {', '.join(RUNS)}")
    for name in parser.parse_args().names or RUNS:
        print(f"{hash_of(*RUNS[name])}  {name}", flush=True)


if __name__ == "__main__":
    main()
