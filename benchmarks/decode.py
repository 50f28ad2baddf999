"""Tokens per second of the native engine on a GPU through its public interface, prefill and scheduling included.

    python -m benchmarks.decode                     the set `main`, a process for each row, and a table at the end
    python -m benchmarks.decode --set seven long    other sets of rows; --help lists them
    python -m benchmarks.decode --row '{...}'       one row, as JSON
    python -m benchmarks.decode --device cpu --over '{"shape": "tiny", "sequences": 4, "new": 8, "profile": false}'

Work: Qwen2.5 shapes, random weights, distinct prompts of 128 tokens given at once, prefix reuse off, end of sequence
ignored, 256 new tokens at temperature 1 over the whole vocabulary, sampled log-probability returned. `ragged`: output
lengths log-uniform between 32 and 2,048. The floors are the bytes of weights and cache that decoding must read over
4.3 TB/s, and its matrix work over 790 TFLOP/s (both measured on an H200). Seconds are medians, `spread` is
(max - min) / median, and the time to the first token counts from the moment when all prompts are given.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.rows import run_rows, spread, trouble
from benchmarks.sft_step import make_config

OPTIONS = {"device": "cuda", "prompt": 128, "new": 256, "repeats": 3}
MOST_CACHED, LONGEST_RAGGED = 1_600_000, 2048
BANDWIDTH, MATRIX_RATE = 4.3e12, 790e12
CLASSES = {
    "attention": ("_attend", "flash"),
    "sampling": ("_sample", "_choose", "_threshold"),
    "norm, gate, rotation": ("norm_forward", "_gate_forward", "_rotation"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK", "cublas"),
}


def make_policy(row: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from lemma.models import installing
    from lemma.models.attention import NAME
    from lemma.models.load_model import _with_lora
    from lemma.models.model_options import LoraOptions
    from lemma.models.policy import Policy

    torch.manual_seed(0)
    dtype = torch.bfloat16 if row["device"] == "cuda" else torch.float32
    with torch.device(row["device"]):
        causal = AutoModelForCausalLM.from_config(make_config(row["shape"]), dtype=dtype, attn_implementation=NAME)
    installing.install(causal, True)
    module = _with_lora(causal, LoraOptions(r=16), "benchmark", 0) if row.get("lora") else causal
    return Policy(module.eval(), None)


def requests(row: dict[str, Any], seed: int) -> list[Any]:
    from lemma.engines.protocol import Request, Sampling

    rng = np.random.default_rng(seed)
    count, vocabulary = row["sequences"], make_config(row["shape"]).vocab_size
    lengths = np.full(count, row["new"])
    if row.get("ragged"):
        drawn = np.random.default_rng(0).uniform(np.log(32), np.log(LONGEST_RAGGED), count)
        lengths = np.exp(drawn).astype(int)
    return [
        Request((seed, i), rng.integers(5, vocabulary, row["prompt"]), Sampling(max_tokens=int(n), ignore_eos=True))
        for i, n in enumerate(lengths)
    ]


def run_native(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    from lemma.engines.native.engine import NativeEngine
    from lemma.engines.protocol import generate

    policy, on_gpu = make_policy(row), row["device"] == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    begin = now(on_gpu)
    longest = LONGEST_RAGGED if row.get("ragged") else row["new"]
    needed = row["sequences"] * (row["prompt"] + longest + 64)
    engine = NativeEngine(policy, cache_tokens=min(needed, MOST_CACHED), share_prefixes=False)
    generate(engine, requests(row | {"ragged": False, "new": 17, "sequences": min(8, row["sequences"])}, 99))
    startup = now(on_gpu) - begin
    generate(engine, requests(row, 98))  # captures the graphs that this load needs
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, total, first = [], 0, []
    for repeat in range(row["repeats"]):
        work = requests(row, repeat)
        begin = now(on_gpu)
        results = generate(engine, work)
        times.append(now(on_gpu) - begin)
        total = sum(len(c.ids) for c in results)
        first.append([c.first_seconds for c in results])
        assert all(len(c.ids) == w.sampling.max_tokens for c, w in zip(results, sorted_like(work), strict=True))
    cache_bytes = 2 * engine.cache.keys.numel() * engine.cache.keys.element_size()
    seconds = float(np.median(times))
    result = row | {
        "tokens_per_second": total / seconds,
        "seconds": seconds,
        "spread": spread(times),
        "first_token_median": float(np.median([np.median(one) for one in first])),
        "first_token_99": float(np.median([np.percentile(one, 99) for one in first])),
        "startup_seconds": startup,
        "cache_gib": cache_bytes / 2**30,
        "preemptions": engine.scheduler.preemptions,
        **floors(engine.policy, work),
    }
    if on_gpu:
        result["beyond_plan_gib"] = (torch.cuda.max_memory_allocated() - before - cache_bytes) / 2**30
    return result | _split(engine, row) if row.get("profile") else result


def floors(policy: Any, work: list[Any]) -> dict[str, float]:
    """Seconds that an H200 needs at least for this work: the weights once a step and the cache of every sequence, and
    matrix work of prompts and new tokens without attention."""
    from lemma.engines.native.sizes import bytes_per_token

    weights = sum(p.numel() for name, p in policy.causal.named_parameters() if "lora_" not in name)
    new = np.array([request.sampling.max_tokens for request in work], dtype=np.float64)
    prompt = np.array([len(request.prompt) for request in work], dtype=np.float64)
    read = float(new.max()) * 2 * weights + float((prompt * new + new**2 / 2).sum()) * bytes_per_token(policy)
    return {
        "floor_bytes_seconds": read / BANDWIDTH,
        "floor_matrix_seconds": 2 * weights * float((prompt + new).sum()) / MATRIX_RATE,
    }


def now(on_gpu: bool) -> float:
    import torch

    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def sorted_like(work: list[Any]) -> list[Any]:
    return sorted(work, key=lambda request: repr(request.key))


def _split(engine: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a prefill and 32 decoding steps, by class of kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

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
    return {
        "ms_per_class_32_steps_and_prefill": dict(spent),
        "largest_others": dict(sorted(others.items(), key=lambda item: -item[1])[:8]),
        "kernels": kernels,
        "layers": engine.policy.causal.config.num_hidden_layers,
    }


def run_transformers(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    policy, on_gpu = make_policy(row), row["device"] == "cuda"
    policy.causal.set_attn_implementation("sdpa")
    size = (row["sequences"], row["prompt"])
    ids = torch.randint(5, policy.causal.config.vocab_size, size, device=row["device"])
    new = row["new"]
    settings = {"do_sample": True, "top_k": 0, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
    times = []
    for _ in range(row["repeats"] + 1):
        begin = now(on_gpu)
        policy.causal.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        times.append(now(on_gpu) - begin)
    seconds = float(np.median(times[1:]))
    rate = row["sequences"] * new / seconds
    return row | {"tokens_per_second": rate, "seconds": seconds, "spread": spread(times[1:])}


def usual(shape: str) -> list[dict[str, Any]]:
    """Three loads, one of uneven lengths, and adapters."""
    base = {"who": "native", "shape": shape}
    return [
        {**base, "sequences": 64},
        {**base, "sequences": 256, "profile": True},
        {**base, "sequences": 1024},
        {**base, "sequences": 1024, "ragged": True},
        {**base, "sequences": 256, "lora": True},
    ]


SETS: dict[str, list[dict[str, Any]]] = {
    "main": [*usual("1.5B"), *usual("0.5B")],
    "seven": [
        {"who": "native", "shape": "7B", "sequences": 256, "profile": True},
        {"who": "native", "shape": "7B", "sequences": 256, "lora": True},
    ],
    "first": [
        {"who": "native", "shape": shape, "sequences": 1024, "prompt": prompt}
        for shape in ("0.5B", "1.5B")
        for prompt in (128, 512)
    ],
    "long": [
        {"who": "native", "shape": "1.5B", "sequences": sequences, "new": 8064, "limit": 260} for sequences in (64, 128)
    ],
    "transformers": [
        {"who": "transformers", "shape": shape, "sequences": 256, "new": 64} for shape in ("1.5B", "0.5B")
    ],
}


def table(results: list[dict[str, Any]]) -> str:
    """Rates, the time to the first token, and the share of the higher floor that a row reaches."""
    heads = [
        "tokens/s",
        "seconds",
        "spread",
        "first token, median",
        "99%",
        "floor by bytes",
        "by matrix work",
        "reached",
    ]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for one in results:
        kinds = [name for name in ("lora", "ragged") if one.get(name)]
        work = f"{one['sequences']} x ({one['prompt']} + {'32..2048' if one.get('ragged') else one['new']})"
        name = ", ".join([one["who"], one["shape"], *kinds, work])
        if "error" in one:
            lines.append(f"| {name} | {trouble(one)} |" + " |" * (len(heads) - 1))
            continue
        cells = [f"{one['tokens_per_second']:,.0f}", f"{one['seconds']:.3f}", f"{one['spread']:.1%}"]
        timed = ("first_token_median", "first_token_99", "floor_bytes_seconds", "floor_matrix_seconds")
        cells += [f"{one[key]:.3f}" if key in one else "" for key in timed]
        least = max(one.get(key, 0.0) for key in timed[2:])
        cells.append(f"{least / one['seconds']:.0%}" if least else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    runners: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]
    runners = {"native": run_native, "transformers": run_transformers}
    run_rows("benchmarks.decode", __doc__, runners, SETS, options=OPTIONS, table=table)
