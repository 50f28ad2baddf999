"""Tokens per second of the native engine on a GPU through its public interface, prefill and scheduling included.

    python -m benchmarks.decode                 the whole table, each row in a process of its own
    python -m benchmarks.decode --row '{...}'   one row, as JSON

Work: Qwen2.5 shapes, random weights, distinct prompts of 128 tokens, prefix reuse off, end of sequence ignored, 256 new
tokens at temperature 1 over the whole vocabulary, sampled log-probability returned. `ragged`: 1,024 requests with
output lengths log-uniform between 32 and 2,048. The floors are the bytes of weights and cache that a step must read
over 4.3 TB/s and its matrix work over 790 TFLOP/s (both measured on an H200).
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.rows import run_rows
from benchmarks.sft_step import make_config

PROMPT, NEW = 128, 256
BANDWIDTH, MATRIX_RATE = 4.3e12, 790e12
CLASSES = {
    "attention": ("_decode_attention", "_combine_splits", "flash"),
    "sampling": ("_sample", "_choose", "_threshold"),
    "norm, gate, rotation, cache": ("norm_forward", "_gate_forward", "_rotate", "_rotation"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK", "cublas"),
}


def make_policy(row: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from lemma.models import blocks
    from lemma.models.attention import NAME
    from lemma.models.load_model import _with_lora
    from lemma.models.model_options import LoraOptions
    from lemma.models.policy import Policy

    torch.manual_seed(0)
    with torch.device("cuda"):
        causal = AutoModelForCausalLM.from_config(
            make_config(row["shape"]), dtype=torch.bfloat16, attn_implementation=NAME
        )
    blocks.install(causal, True)
    module = _with_lora(causal, LoraOptions(r=16), "benchmark", 0) if row.get("lora") else causal
    return Policy(module.eval(), None)


def requests(row: dict[str, Any], seed: int) -> list[Any]:
    from lemma.engines.protocol import Request, Sampling

    rng = np.random.default_rng(seed)
    count = row["sequences"]
    if row.get("ragged"):
        lengths = np.exp(rng.uniform(np.log(32), np.log(2048), count)).astype(int)
    else:
        lengths = np.full(count, row.get("new", NEW))
    return [
        Request((seed, i), rng.integers(5, 150000, PROMPT), Sampling(max_tokens=int(n), ignore_eos=True))
        for i, n in enumerate(lengths)
    ]


def run_native(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    from lemma.engines.native.engine import NativeEngine
    from lemma.engines.protocol import generate

    policy = make_policy(row)
    before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    tokens_needed = row["sequences"] * (PROMPT + (2048 if row.get("ragged") else NEW) + 64)
    engine = NativeEngine(policy, cache_tokens=min(tokens_needed, 1_600_000), share_prefixes=False)
    generate(engine, requests(row | {"ragged": False, "new": 17, "sequences": 8}, 99))
    torch.cuda.synchronize()
    startup = time.perf_counter() - begin
    generate(engine, requests(row, 98))  # captures the graphs that this load needs
    torch.cuda.reset_peak_memory_stats()
    times, total = [], 0
    for repeat in range(row.get("repeats", 3)):
        work = requests(row, repeat)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        results = generate(engine, work)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        total = sum(len(c.ids) for c in results)
        assert all(len(c.ids) == w.sampling.max_tokens for c, w in zip(results, sorted_like(work), strict=True))
    cache_bytes = 2 * engine.cache.keys.numel() * engine.cache.keys.element_size()
    extra = torch.cuda.max_memory_allocated() - before - cache_bytes
    seconds = float(np.median(times))
    result = row | {
        "tokens_per_second": total / seconds,
        "seconds": seconds,
        "spread": (max(times) - min(times)) / seconds,
        "startup_seconds": startup,
        "beyond_plan_gib": extra / 2**30,
        "cache_gib": cache_bytes / 2**30,
        "preemptions": engine.scheduler.preemptions,
    }
    return result | _split(engine, row) if row.get("profile") else result


def sorted_like(work: list[Any]) -> list[Any]:
    return sorted(work, key=lambda request: repr(request.key))


def _split(engine: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of one decoding step by class of kernel, and its floors."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from lemma.engines.native.engine import bytes_per_token
    from lemma.engines.protocol import generate

    short = requests(row | {"new": 33, "ragged": False}, 77)
    generate(engine, short[: row["sequences"]])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(engine, requests(row | {"new": 33, "ragged": False}, 78))
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    others: dict[str, float] = defaultdict(float)
    kernels = 0
    for event in profiler.key_averages():
        name = next((c for c, parts in CLASSES.items() if any(p in event.key for p in parts)), "other")
        spent[name] += event.self_device_time_total / 1e3
        kernels += event.count
        if name == "other":
            others[event.key[:70]] += event.self_device_time_total / 1e3
    config = engine.policy.causal.config
    weights = sum(p.numel() for p in engine.policy.causal.parameters())
    cache = row["sequences"] * (PROMPT + NEW / 2) * bytes_per_token(engine.policy)
    return {
        "ms_per_class_32_steps_and_prefill": dict(spent),
        "largest_others": dict(sorted(others.items(), key=lambda item: -item[1])[:8]),
        "kernels": kernels,
        "floor_bytes_ms": (2 * weights + cache) / BANDWIDTH * 1e3,
        "floor_flops_ms": 2 * weights * row["sequences"] / MATRIX_RATE * 1e3,
        "layers": config.num_hidden_layers,
    }


def run_transformers(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    policy = make_policy(row)
    policy.causal.set_attn_implementation("sdpa")
    ids = torch.randint(5, 150000, (row["sequences"], PROMPT), device="cuda")
    new = row.get("new", 64)
    settings = {"do_sample": True, "top_k": 0, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        policy.causal.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return row | {"tokens_per_second": row["sequences"] * new / times[-1], "seconds": times[-1]}


def default_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shape in ("0.5B", "1.5B"):
        for sequences in (64, 256, 1024):
            profiled = {"profile": True} if sequences == 256 else {}
            rows.append({"who": "native", "shape": shape, "sequences": sequences, **profiled})
        rows.append({"who": "native", "shape": shape, "sequences": 1024, "ragged": True, "repeats": 2})
        rows.append({"who": "native", "shape": shape, "sequences": 256, "lora": True})
        rows.append({"who": "transformers", "shape": shape, "sequences": 256})
    return rows


if __name__ == "__main__":
    run_rows("benchmarks.decode", __doc__, {"native": run_native, "transformers": run_transformers}, default_rows)
