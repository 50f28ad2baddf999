"""One step of DPO on a GPU, compared with TRL's DPOTrainer on the same pairs: time, tokens/s, MFU and peak memory.

    python -m benchmarks.dpo_step                 the whole table, each row in its own process
    python -m benchmarks.dpo_step --row '{...}'   one row, as JSON ("shape": "smoke" runs on a CPU)

Work: Qwen2.5-1.5B shape, random weights, full fine-tuning with fp32 master weights (or LoRA r=16), 32 pairs a step with
prompts of 64 to 320 and responses of 64 to 960 tokens, packs of 8k tokens; TRL pads batches of `batch` pairs. With full
weights both score the reference beforehand, which is not timed; with LoRA both score it at every step, with the
adapter off. Tokens are those of the pairs, prompts counted twice and padding not at all. MFU = 6 x parameters x
tokens / seconds / 790 TFLOP/s (the matrix rate measured on an H200); recomputation and the reference do not count as
work.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grpo_work import make_tokenizer
from benchmarks.rows import run_rows
from benchmarks.sft_step import COMMON, MATRIX_RATE, SHAPES

PAIRS, PACK, PROMPT, RESPONSE = 32, 8192, (64, 320), (64, 960)
WARM_UP, TIMED = 2, 5
SMOKE = {**COMMON, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMOKE["vocab_size"] = 512


def is_smoke(row: dict[str, Any]) -> bool:
    """Whether the row only shows that everything runs."""
    return row["shape"] == "smoke"


def pairs(row: dict[str, Any], steps: int) -> list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Prompt, chosen and rejected response of every pair of every step; responses end with the end of sequence."""
    rng = np.random.default_rng(0)
    small, words = (16, SMOKE["vocab_size"]) if is_smoke(row) else (1, COMMON["vocab_size"])

    def ids(limits: tuple[int, int]) -> np.ndarray:
        return rng.integers(5, words, int(rng.integers(limits[0] // small, limits[1] // small + 1)))

    def response() -> np.ndarray:
        return np.append(ids(RESPONSE), 1)

    return [[(ids(PROMPT), response(), response()) for _ in range(PAIRS)] for _ in range(steps)]


def make_model(row: dict[str, Any], dtype: Any, attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    shape = SMOKE if is_smoke(row) else {**SHAPES[row["shape"]], **COMMON}
    config = Qwen2Config(**shape, eos_token_id=1, pad_token_id=2)
    with torch.device("cpu" if is_smoke(row) else "cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def make_policy(row: dict[str, Any], options: Any) -> Any:
    import torch

    from lemma.models import installing
    from lemma.models.attention import NAME
    from lemma.models.load_model import _with_lora
    from lemma.models.policy import Policy

    causal = make_model(row, torch.float32 if is_smoke(row) else torch.bfloat16, NAME)
    for parameter in causal.parameters():
        parameter.requires_grad_(options.lora is None)
    installing.install(causal, True)
    if options.checkpointing:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    module = _with_lora(causal, options.lora, "benchmark", 0) if options.lora else causal
    policy = Policy(module, None)
    policy.probe()
    return policy


def run_lemma(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    from lemma.algorithms.preference import Dpo
    from lemma.learning.learner import Learner
    from lemma.learning.learning_options import OptimOptions
    from lemma.models.memory import Shape, plan_training
    from lemma.models.model_options import LoraOptions, ModelOptions
    from lemma.stages.preference.examples import Example
    from lemma.stages.preference.preference_loop import PairScorer, as_trajectories
    from lemma.stages.preference.scores import precompute
    from lemma.stages.reference import AdaptersOff

    lora = LoraOptions(r=16) if row.get("lora") else None
    options = ModelOptions(path="benchmark", checkpointing=row["recompute"], lora=lora)
    policy = make_policy(row, options)
    budget, algorithm = row.get("budget", PACK), Dpo()
    learner = Learner(
        policy,
        OptimOptions(lr=1e-6),
        token_budget=budget,
        total_steps=100,
        compile_blocks=row.get("compile", False),
        say=lambda text: print(text, file=sys.stderr),
    )
    work = [[Example(p, (w, r), (1, -1)) for p, w, r in step] for step in pairs(row, WARM_UP + TIMED)]
    sequences = [one for step in work for one in as_trajectories(step, algorithm)]
    begin = time.perf_counter()
    if row.get("lora"):
        reference: Any = AdaptersOff(policy, learner)
    else:
        with tempfile.TemporaryDirectory() as folder:
            reference = precompute(policy, learner, sequences, Path(folder), lambda done, total: None)
    reference_seconds = time.perf_counter() - begin
    scorer = PairScorer(algorithm, policy, learner, reference, 10**6)
    times, losses, tokens = [], [], []
    for step in work:
        _wait(torch)
        begin = time.perf_counter()
        report = scorer.observe(learner.step(*scorer.ready(step)), step)
        _wait(torch)
        times.append(time.perf_counter() - begin)
        losses.append(report.loss)
        tokens.append(report.tokens)
    plan = plan_training(Shape.of_config(policy.causal.config.to_dict()), options, "bf16", budget)
    parameters = _base_parameters(policy.module)
    return _summary(row, times[WARM_UP:], tokens[WARM_UP:], parameters, torch) | {
        "packs": report.packs,
        "planned_gib": plan.total / 2**30,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "reference_seconds": None if row.get("lora") else reference_seconds,
        "budget_after": learner.token_budget,
    }


def run_trl(row: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    on_gpu = not is_smoke(row)
    model = make_model(row, torch.float32 if row["weights"] == "fp32" else torch.bfloat16, row["attention"])
    work = pairs(row, WARM_UP + TIMED)

    def text(ids: np.ndarray) -> str:
        return " ".join("<eos>" if token == 1 else f"w{token}" for token in ids.tolist())

    flat = [pair for step in work for pair in step]
    rows = {
        "prompt": [text(prompt) for prompt, _, _ in flat],
        "chosen": [" " + text(chosen) for _, chosen, _ in flat],
        "rejected": [" " + text(rejected) for _, _, rejected in flat],
    }
    folder = tempfile.mkdtemp()
    arguments = DPOConfig(
        output_dir=folder,
        max_length=None,
        per_device_train_batch_size=row["batch"],
        gradient_accumulation_steps=PAIRS // row["batch"],
        max_steps=WARM_UP + TIMED,
        precompute_ref_log_probs=not row.get("lora"),
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=row["recompute"],
        use_liger_kernel=row["liger"],
        learning_rate=1e-6,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        optim="adamw_torch_fused",
        dataloader_num_workers=2 if on_gpu else 0,
    )
    times: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            _wait(torch)
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            _wait(torch)
            times.append(time.perf_counter() - self.begin)

    more: dict[str, Any] = {}
    if row.get("lora"):
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    else:
        model.save_pretrained(folder)
        model.config._name_or_path = folder  # where TRL looks for the reference, which is scored once and let go
    trainer = DPOTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        processing_class=make_tokenizer(COMMON["vocab_size"]),
        callbacks=[Timer()],
        **more,
    )
    trainer.train()
    tokens = [sum(2 * len(p) + len(w) + len(r) for p, w, r in step) for step in work]
    parameters = _base_parameters(trainer.model)
    mean = [int(np.mean(tokens))] * TIMED  # TRL shuffles pairs over steps
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return _summary(row, times[WARM_UP:], mean, parameters, torch) | {"first_loss": losses[0], "last_loss": losses[-1]}


def _base_parameters(module: Any) -> int:
    """Parameters of the model without adapters: only these count as work, for both systems."""
    return sum(p.numel() for name, p in module.named_parameters() if "lora_" not in name)


def _wait(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _summary(row: dict[str, Any], times: list[float], tokens: list[int], parameters: int, torch: Any) -> dict[str, Any]:
    rates = [count / seconds for count, seconds in zip(tokens, times, strict=True)]
    rate = float(np.median(rates))
    on_gpu = torch.cuda.is_available()
    return row | {
        "seconds": float(np.median(times)),
        "spread": (max(rates) - min(rates)) / rate,
        "tokens": int(np.mean(tokens)),
        "tokens_per_second": rate,
        "mfu": 6.0 * parameters * rate / MATRIX_RATE,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
        "parameters": parameters,
    }


def default_rows() -> list[dict[str, Any]]:
    """Lemma with and without recomputation, TRL's batches up to its memory limit, its fp32 weights, and LoRA."""
    base = {"shape": "1.5B", "recompute": False}
    again = {"shape": "1.5B", "recompute": True}
    peer = {"who": "trl", "attention": "sdpa", "weights": "bf16", "liger": True}
    return [
        {"who": "lemma", **base},
        {"who": "lemma", **again},
        *({**peer, **base, "batch": batch} for batch in (4, 8, 2, 16)),
        *({**peer, **again, "batch": batch} for batch in (8, 16)),
        {**peer, **base, "weights": "fp32", "batch": 4},
        {"who": "lemma", **base, "lora": True},
        {**peer, **base, "lora": True, "batch": 4},
    ]


if __name__ == "__main__":
    run_rows("benchmarks.dpo_step", __doc__, {"lemma": run_lemma, "trl": run_trl}, default_rows)
