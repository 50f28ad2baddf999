"""Rank 0 with simulated other ranks: memory and update time of one rank of 8 or 64, compared with the memory plan.

    python -m benchmarks.fake_world                                    on an H200: 1.5B, 7B and 14B
    python -m benchmarks.fake_world --rows '[{"shape": "tiny", "ranks": 8, "shard": "optimiser"}]'   mechanics, on a CPU

Kernels are real, the other ranks are not: collectives return this rank's own data, without communication. So memory is
that of a real rank, and seconds are those of its computation alone. Weights are random. `planned` is what
`lemma plan --ranks` says.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.rows import Row, run_rows
from benchmarks.sft_step import SHAPES, make_config, segments

SHAPES.setdefault(
    "14B",
    {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
)
WARM_UP, TIMED = 1, 3
GIB = 2**30


def pretend(ranks: int) -> None:
    """Collectives that return this rank's own data, with the sizes of real ones and without communication."""
    import torch
    import torch.distributed as dist

    def gather(everything: list[Any], value: Any, group: Any = None) -> None:
        everything[:] = [value] * len(everything)

    def exchange(taken: torch.Tensor, given: torch.Tensor, *sizes: Any, group: Any = None) -> None:
        """Each rank would send here what this one keeps for itself."""
        for part in taken.split(sizes[0]):
            part.copy_(given[: part.numel()])

    changed: Any = dist
    changed.all_gather_object, changed.all_to_all_single = gather, exchange
    changed.broadcast = lambda tensor, **where: None


def run_rank(row: Row) -> Row:
    import torch
    from transformers import AutoModelForCausalLM

    from lemma.core.ranks import RankWorld, joined
    from lemma.core.types import Trajectory
    from lemma.learning.learner import Learner
    from lemma.learning.learning_options import OptimOptions
    from lemma.models import installing
    from lemma.models.attention import NAME
    from lemma.models.memory import Shape, plan_training
    from lemma.models.model_options import ModelOptions
    from lemma.models.policy import Policy
    from lemma.objectives import NegativeLogLikelihood

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks, shard, budget = row["ranks"], row["shard"], row["budget"]
    config = make_config(row["shape"])
    torch.manual_seed(0)
    with torch.device(device):
        causal = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
    installing.install(causal, True)
    causal.gradient_checkpointing_enable({"use_reentrant": False})
    pretend(ranks)
    times = []
    with joined(RankWorld(0, ranks, ranks, on_device=True)):
        policy = Policy(causal, None)
        learner = Learner(policy, OptimOptions(lr=1e-6), token_budget=budget, total_steps=100, shard=shard)
        for step in range(WARM_UP + TIMED):
            mine = segments(budget, row["packs"], step)
            data = [Trajectory(ids % config.vocab_size, np.arange(len(ids)) > 0) for ids in mine * ranks]
            begin = time.perf_counter()
            learner.step(data, NegativeLogLikelihood())
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    options = ModelOptions(path="benchmark", checkpointing=True)
    plan = plan_training(Shape.of_config(config.to_dict()), options, "bf16", budget, ranks=ranks, shard=shard)
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    planned = plan.total / GIB
    return row | {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "seconds": sorted(times[WARM_UP:])[TIMED // 2], "peak_gib": peak, "planned_gib": planned,
        "off": None if peak is None else peak / planned - 1,
    }  # fmt: skip


def rows() -> list[Row]:
    """Rows that fit one H200, by the plan."""
    kinds = [
        ("1.5B", "optimiser"),
        ("1.5B", "gradients"),
        ("7B", "optimiser"),
        ("7B", "gradients"),
        ("14B", "gradients"),
    ]
    return [
        {"who": "rank", "shape": shape, "shard": shard, "ranks": ranks} for shape, shard in kinds for ranks in (8, 64)
    ]


def table(results: list[Row]) -> str:
    lines = ["| shape | ranks | shard | seconds | peak GiB | planned GiB | off |", "|---|---|---|---|---|---|---|"]
    for row in results:
        if "error" in row:
            lines.append(f"| {row['shape']} | {row['ranks']} | {row['shard']} | {row['error']} ||||")
            continue
        peak = ("-", "-") if row["peak_gib"] is None else (f"{row['peak_gib']:.1f}", f"{row['off']:+.1%}")
        lines.append(
            f"| {row['shape']} | {row['ranks']} | {row['shard']} | {row['seconds']:.2f} | {peak[0]} "
            f"| {row['planned_gib']:.1f} | {peak[1]} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_rows(
        "benchmarks.fake_world", __doc__, {"rank": run_rank}, rows, options={"budget": 4096, "packs": 2}, table=table
    )
