"""The workload of the RL benchmarks: model, tokenizer, prompts, recipe, lower bounds, clocks."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.sft_step import MATRIX_RATE, make_config

Row = dict[str, Any]
QUESTIONS = 512
BANDWIDTH = 4.3e12
REWARD = '''
def varies(item):
    """A number that depends on the sampled ids."""
    return float(sum(item.ids) % 101)
'''


def make_tokenizer(vocabulary: int) -> Any:
    """A word for every id, so that any tokens have a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<unk>": 0, "<eos>": 1, "<pad>": 2}
    words = Tokenizer(models.WordLevel({**special, **{f"w{i}": i for i in range(3, vocabulary)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def questions(row: Row, vocabulary: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(f"w{rng.randint(5, vocabulary - 1)}" for _ in range(row["prompt"])) for _ in range(QUESTIONS)]


def config_of(row: Row) -> Any:
    config = make_config(row["shape"])
    config.eos_token_id, config.pad_token_id = 1, 2
    return config


def random_model(config: Any, device: str, **how: Any) -> Any:
    """A model with random weights, the same at every call, made where it is used."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[0] if device == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, **how)


def parameters_of(config: Any) -> int:
    return sum(parameter.numel() for parameter in random_model(config, "meta").parameters())


def write_model(row: Row, folder: Path) -> None:
    """A model folder without weights, which `made_in_memory` provides."""
    config = config_of(row)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    # In a folder of its own: next to a configuration, transformers would take the tokenizer of the model's family.
    make_tokenizer(config.vocab_size).save_pretrained(folder / "tokenizer")


def made_in_memory(device: str) -> AbstractContextManager[Any]:
    """Within `with`, Lemma's models are made at random on the device in place of being read from the disk: writing and
    reading 15 GB would take longer than the steps."""
    from lemma.models import load_model

    def made(path: str, options: Any, arguments: Row) -> Any:
        from transformers import AutoConfig

        return random_model(AutoConfig.from_pretrained(path), device, **arguments).eval()

    return mock.patch.object(load_model, "_from_pretrained", made)


@contextlib.contextmanager
def memory_limited(gib: float | None) -> Iterator[None]:
    """Within `with`, the GPU seems to have so much memory, and no more can be had. Lemma's plan asks for the size of
    the device, which torch's own limit does not change: so the answer is changed as well."""
    import torch

    if gib is None:
        yield
        return
    limit, ask, ask_free = int(gib * 2**30), torch.cuda.get_device_properties, torch.cuda.mem_get_info
    whole = ask(0).total_memory

    class Smaller:
        def __init__(self, properties: Any):
            self._properties, self.total_memory = properties, limit

        def __getattr__(self, name: str) -> Any:
            return getattr(self._properties, name)

    def free(device: Any = None) -> tuple[int, int]:
        return max(0, ask_free(device)[0] - (whole - limit)), limit

    torch.cuda.set_per_process_memory_fraction(limit / whole)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: Smaller(ask(device))),
        mock.patch.object(torch.cuda, "mem_get_info", free),
    ):
        yield


def recipe(row: Row, folder: Path, vocabulary: int) -> Row:
    """The recipe of a row: values that it does not set are Lemma's defaults."""
    (folder / "reward.py").write_text(REWARD)
    rows = [json.dumps({"question": text, "answer": "1"}) for text in questions(row, vocabulary)]
    (folder / "problems.jsonl").write_text("\n".join(rows) + "\n")
    place = folder / "model"
    model = {"path": str(place), "tokenizer": str(place / "tokenizer"), "lora": {"r": 16} if row.get("lora") else None}
    model |= {"share_prompts": row["share"]} if "share" in row else {}
    model |= {"checkpointing": row["recompute"]} if "recompute" in row else {}
    batch = {"problems": row["problems"]} | ({"token_budget": row["budget"]} if "budget" in row else {})
    return {
        "run": {"dir": str(folder / "run"), "device": row["device"], "tensorboard": False},
        "model": model,
        "format": "question_only",
        "stages": {
            "step": {
                "kind": "rl",
                "algorithm": {"name": row.get("algorithm", "grpo"), "group_size": row["samples"]},
                "data": {"source": str(folder / "problems.jsonl")},
                "rewards": [f"{folder / 'reward.py'}:varies"],
                "rollout": {"max_tokens": row["new"]},
                "batch": batch,
                "optim": {"lr": 1e-6, "name": row.get("optim", "adamw")},
                "steps": row["steps"] + 1,
            }
        },
    }


def floors(row: Row, config: Any, parameters: int, updates: int = 1) -> dict[str, float]:
    """Seconds that an H200 needs at least: for the bytes that decoding reads, weights at every step and the cache of
    every sequence; and for matrix work, attention included. With a critic it is trained as the policy is, less the
    head; under LoRA no gradients of weights are computed."""
    samples, prompt, new = row["problems"] * row["samples"], row["prompt"], row["new"]
    width = config.hidden_size // config.num_attention_heads
    cache = 4 * config.num_hidden_layers * config.num_key_value_heads * width
    read = new * 2 * parameters + samples * (prompt * new + new**2 / 2) * cache
    # Forward, for each pair of tokens that see each other: scores and their use, two operations each.
    seen = 4 * config.num_hidden_layers * config.hidden_size
    sampled = 2 * parameters * (samples * new + row["problems"] * prompt)
    sampled += samples * seen * (prompt * new + new**2 / 2)
    tokens, passes = samples * (prompt + new), 2 if row.get("lora") else 3
    learnt = passes * (2 * parameters * tokens + samples * seen * (prompt + new) ** 2 / 2) * updates
    if row.get("algorithm") == "ppo":
        head = 2 * passes * config.vocab_size * config.hidden_size * tokens * updates
        learnt += learnt - head
    return {
        "floor_generate_bytes_seconds": read / BANDWIDTH,
        "floor_generate_matrix_seconds": sampled / MATRIX_RATE,
        "floor_update_seconds": learnt / MATRIX_RATE,
    }


class Watch:
    """Seconds that calls of some functions take, step by step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def over(self, name: str | Callable[..., str], owner: Any, function: str) -> AbstractContextManager[Any]:
        """Inside `with`, the time of this function is counted as `name`, which may depend on its arguments."""
        call = getattr(owner, function)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                called = name(*arguments, **named) if callable(name) else name
                self.spent[called] = self.spent.get(called, 0.0) + time.perf_counter() - begin

        return mock.patch.object(owner, function, timed)
