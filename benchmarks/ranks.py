"""Two ranks on two cores compared with one rank on one core: seconds per step of SFT and GRPO, and the speed-up.

    python -m benchmarks.ranks

A model of 20 million parameters in fp32 on a CPU, one thread per rank, gloo. Both runs have two slots and so the same
losses to the last bit, which is checked. Whole runs take turns; the table shows the median and the spread over their
steps. Run it on idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE = "{hidden: 384, layers: 10, feed_forward: 1280, heads: 6, kv_heads: 2}"
RECIPES = {
    "sft": """
    kind: supervised
    data: {source: arithmetic, arithmetic: {operations: 8, largest: 99, style: mixed, count: 4000}}
    batch: {sequences: 128, token_budget: 1024}
    optim: {lr: 5.0e-4}
    log_every: 1
""",
    "grpo": """
    kind: rl
    algorithm: {name: grpo, group_size: 8, scale: none}
    data: {source: arithmetic, arithmetic: {operations: 8, largest: 99, style: mixed, count: 4000}}
    rewards: [accuracy, {name: length, weight: 0.1}]
    rollout: {max_tokens: 64, engine: {name: native, sequences: 64}}
    batch: {problems: 8, token_budget: 1024}
    optim: {lr: 2.0e-6}
    eval: {every: 1000}
""",
}


def recipe(kind: str, folder: Path, steps: int) -> str:
    return (
        f"run: {{dir: {folder}, device: cpu}}\nmodel: {{path: tiny, tiny: {SHAPE}}}\n"
        "format: {name: r1_zero, preamble: false}\n"
        f"cluster: {{slots: 2}}\nstages:\n  {kind}:{RECIPES[kind]}    steps: {steps}\n    checkpoint: {{every: 1000}}\n"
    )


def measure(kind: str, ranks: int, steps: int) -> dict[str, Any]:
    """One run in its own process: seconds of each step after the first, and the losses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "recipe.yaml"
        path.write_text(recipe(kind, folder / "run", steps))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "lemma", "train", str(path), "--ranks", str(ranks)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["axis"] == "train"]
    return {"seconds": [row["timings"]["seconds"] for row in rows[1:]], "losses": [row["loss"] for row in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2, help="runs of each kind, in turns")
    arguments = parser.parse_args()
    print("| stage | one rank, s | two ranks, s | gain | same losses |\n|---|---|---|---|---|")
    for kind in RECIPES:
        seconds: dict[int, list[float]] = {1: [], 2: []}
        losses = []
        for _ in range(arguments.repeat):
            for ranks in seconds:
                result = measure(kind, ranks, arguments.steps)
                seconds[ranks] += result["seconds"]
                losses.append(result["losses"])
        one, two = (statistics.median(values) for values in seconds.values())
        spread = [f"{min(values):.2f} to {max(values):.2f}" for values in seconds.values()]
        same = all(other == losses[0] for other in losses)
        print(f"| {kind} | {one:.2f} ({spread[0]}) | {two:.2f} ({spread[1]}) | {one / two:.2f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
