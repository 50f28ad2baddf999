"""TRL's PPOTrainer on the work of a row. Its last release with one is 1.12.0: `wheel` of a row names its file, which is
unpacked and used in place of the TRL that is installed.

TRL keeps the logits of every sampled token until the update is over: 512 tokens of 64 samples take 20 GB at 152k words,
and 256 samples would not fit into one GPU. It asks for a reward model: a tiny one stands in, where Lemma calls
a function. Policy, critic and moments are in bf16 without fp32 masters.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.grpo_work import Row, Watch, config_of, make_tokenizer, questions, random_model
from benchmarks.rows import spread
from benchmarks.sft_step import SHAPES

WHEEL = ".gpu/ppo_trl/trl-1.12.0-py3-none-any.whl"


def run_trl_ppo(row: Row) -> Row:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    trainer_module, settings = import_ppo(Path(row.get("wheel", WHEEL)))
    torch.manual_seed(0)
    config, on_gpu = config_of(row), row["device"] == "cuda"
    samples = row["problems"] * row["samples"]
    tokenizer = make_tokenizer(config.vocab_size)
    tokenizer.padding_side = "left"
    asked = [text for text in questions(row, config.vocab_size) for _ in range(row["samples"])]
    prompts = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in asked]})
    arguments = settings(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=row["batch"],
        gradient_accumulation_steps=samples // row["batch"],
        local_rollout_forward_batch_size=row.get("rollout_batch", min(samples, 64)),
        total_episodes=row["steps"] * samples,
        num_mini_batches=1,
        num_ppo_epochs=4,
        response_length=row["new"],
        temperature=1.0,
        kl_coef=0.05,
        learning_rate=1e-6,
        num_sample_generations=0,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
    )
    times: list[float] = []
    generating: list[float] = []
    watch = Watch()

    class Timer(TrainerCallback):
        """PPOTrainer reports the end of a step but not its start."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = now(on_gpu)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(now(on_gpu) - self.begin)
            self.begin += times[-1]
            generating.append(watch.spent.pop("generate"))
            print(f"step {len(times)}: {times[-1]:.1f} s, of it {generating[-1]:.1f} s generating", flush=True)

    def model() -> Any:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        return random_model(config, row["device"], dtype=dtype, attn_implementation="sdpa")

    trainer = trainer_module.PPOTrainer(
        args=arguments,
        processing_class=tokenizer,
        model=model(),
        ref_model=model(),
        reward_model=scorer(config, row["device"], tiny=True),
        value_model=scorer(config, row["device"]),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(1)),
        callbacks=[Timer()],
    )
    with watch.over("generate", trainer_module, "batch_generation"):
        trainer.train()
    timed = times[1:] or times
    result = row | {"seconds": statistics.median(timed), "spread": spread(timed), "first_step": times[0]}
    result["generate_seconds"] = statistics.median(generating[1:] or generating)
    return result | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def import_ppo(wheel: Path) -> tuple[Any, Any]:
    """The module of the trainer and the class of its settings, from this wheel."""
    assert "trl" not in sys.modules, "another TRL is loaded already"
    assert wheel.is_file(), f"{wheel} is not here: pip download --no-deps trl==1.12.0"
    place = tempfile.mkdtemp()
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place)
    sys.path.insert(0, place)
    from trl.experimental.ppo import PPOConfig, ppo_trainer

    return ppo_trainer, PPOConfig


def scorer(config: Any, device: str, *, tiny: bool = False) -> Any:
    """A model with one number per token: the critic, of the policy's shape, or a tiny reward model."""
    import torch
    from transformers import AutoModelForSequenceClassification

    own = type(config)(**{**config.to_dict(), "num_labels": 1})
    if tiny:
        small = {**SHAPES["tiny"], "vocab_size": config.vocab_size, "layer_types": None}
        own = type(config)(**{**own.to_dict(), **small})
        own.num_key_value_heads = 2
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForSequenceClassification.from_config(own, dtype=dtype, attn_implementation="sdpa")


def now(on_gpu: bool) -> float:
    import torch

    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
