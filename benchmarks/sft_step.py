"""One supervised step on a GPU, compared with TRL's SFTTrainer on the same work: time, MFU and peak memory.

    python -m benchmarks.sft_step                 the whole table, each row in its own process
    python -m benchmarks.sft_step --row '{...}'   one row, as JSON

Work: Qwen2.5-1.5B shape, random weights, full fine-tuning with fp32 master weights; packs of 16k tokens made of
segments of 200 to 1,200 tokens, every token trained on. MFU = 6 x parameters x tokens / seconds / 790 TFLOP/s (the
matrix rate measured on an H200); recomputation is not counted as work.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.rows import run_rows

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"vocab_size": 2048, "max_position_embeddings": 2048},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "vocab_size": 49152},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}
COMMON = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768}
MATRIX_RATE = 790e12
PACK, SHORTEST, LONGEST, SLACK = 16384, 200, 1200, 128
WARM_UP, TIMED = 3, 8


def segments(pack_tokens: int, count: int, seed: int, longest: int | None = None) -> list[np.ndarray]:
    """Random sequences that fill `count` packs but for a slack that lets first-fit packing succeed. With `longest`, all
    but the last have so many tokens."""
    rng = np.random.default_rng(seed)
    result: list[np.ndarray] = []
    left = count * (pack_tokens - SLACK)
    while left >= SHORTEST:
        length = min(left, longest or int(rng.integers(SHORTEST, LONGEST + 1)))
        result.append(rng.integers(5, 150000, length))
        left -= length
    return result


def make_config(shape: str) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**{**COMMON, **SHAPES[shape]})


def run_lemma(row: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from lemma.core.types import Trajectory
    from lemma.learning.learner import Learner
    from lemma.learning.learning_options import OptimOptions
    from lemma.models import installing
    from lemma.models.attention import NAME
    from lemma.models.load_model import _with_lora
    from lemma.models.memory import Shape, plan_training
    from lemma.models.model_options import LoraOptions, ModelOptions
    from lemma.models.policy import Policy
    from lemma.objectives import NegativeLogLikelihood

    options = ModelOptions(
        path="benchmark",
        checkpointing=row["recompute"],
        lora=LoraOptions(r=16) if row.get("lora") else None,
        fused=row.get("fused", True),
    )
    torch.manual_seed(0)
    if row.get("deterministic"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    config = make_config(row["shape"])
    with torch.device("cuda"):
        causal = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
    for parameter in causal.parameters():
        parameter.requires_grad_(options.lora is None)
    installing.install(causal, options.fused)
    if options.checkpointing:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    module = _with_lora(causal, options.lora, "benchmark", 0) if options.lora else causal
    policy = Policy(module, None)
    policy.probe()
    budget = row.get("budget", PACK)
    learner = Learner(
        policy,
        OptimOptions(lr=1e-5),
        token_budget=budget,
        total_steps=100,
        compile_blocks=row.get("compile", False),
        say=lambda text: print(text, file=sys.stderr),
    )
    times, losses = [], []
    for step in range(WARM_UP + TIMED):
        data = [
            Trajectory(ids, np.arange(len(ids)) > 0) for ids in segments(budget, row["packs"], step, row.get("longest"))
        ]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        report = learner.step(data, NegativeLogLikelihood())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        losses.append(report.loss)
        assert report.packs == row["packs"], report.packs
    plan = plan_training(Shape.of_config(config.to_dict()), options, "bf16", budget)
    parameters = sum(p.numel() for p in causal.parameters())
    return _summary(row, times[WARM_UP:], report.tokens, parameters, torch) | {
        "planned_gib": plan.total / 2**30,
        "loss": losses[-1],
        "budget_after": learner.token_budget,
    }


def run_trl(row: dict[str, Any]) -> dict[str, Any]:
    import tempfile

    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    dtype = torch.float32 if row["weights"] == "fp32" else torch.bfloat16
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            make_config(row["shape"]), dtype=dtype, attn_implementation=row["attention"]
        )
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    rows = [ids.tolist() for ids in segments(PACK, row["packs"] * (WARM_UP + TIMED), 0)]
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        packing=True,
        max_length=PACK,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=row["packs"],
        max_steps=WARM_UP + TIMED - 1,
        bf16=True,
        gradient_checkpointing=row["recompute"],
        use_liger_kernel=row["liger"],
        learning_rate=1e-5,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        optim="adamw_torch_fused",
        dataloader_num_workers=2,
    )
    times: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter() - self.begin)

    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        callbacks=[Timer()],
    )
    packed = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    trainer.train()
    tokens_per_step = int(np.mean(packed) * row["packs"])
    parameters = sum(p.numel() for p in model.parameters())
    return _summary(row, times[WARM_UP:], tokens_per_step, parameters, torch)


def _summary(row: dict[str, Any], times: list[float], tokens: int, parameters: int, torch: Any) -> dict[str, Any]:
    median = float(np.median(times))
    return row | {
        "seconds": median,
        "spread": (max(times) - min(times)) / median,
        "tokens_per_second": tokens / median,
        "mfu": 6.0 * parameters * tokens / median / MATRIX_RATE,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "parameters": parameters,
    }


def default_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for recompute in (False, True):
        base = {"shape": "1.5B", "recompute": recompute, "packs": 4}
        rows += [{"who": "lemma", **base}, {"who": "lemma", **base, "deterministic": True}]
        for weights in ("fp32", "bf16"):
            rows += [{"who": "trl", **base, "attention": "sdpa", "weights": weights, "liger": True}]
    return rows


if __name__ == "__main__":
    run_rows("benchmarks.sft_step", __doc__, {"lemma": run_lemma, "trl": run_trl}, default_rows)
