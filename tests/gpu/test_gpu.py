"""What only a GPU can show: fused kernels and variable-length attention against plain code, real lack of memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from lemma.core.types import Trajectory
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Request, Sampling, generate
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.attention import _bucketed
from lemma.models.blocks import gated, rms_norm
from lemma.models.load_model import build_policy
from lemma.models.logprobs import token_logprobs
from lemma.models.model_options import ModelOptions, TinyOptions
from lemma.models.packing import Segments, TokenBatch
from lemma.models.varlen_attention import AttentionSpec, varlen
from lemma.objectives import NegativeLogLikelihood
from tests.models.small import relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(4096, 1536), (3, 777, 128), (33, 8960)])
def test_fused_blocks_equal_plain_ones(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, up = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.rand(shape[-1], device="cuda", dtype=dtype, requires_grad=True)
    pull = torch.randn(shape, device="cuda", dtype=dtype)
    for function, inputs in (
        (lambda f: rms_norm(x, weight, 1e-6, f), (x, weight)),
        (lambda f: gated(x, up, f), (x, up)),
    ):
        results = []
        for fused in (False, True):
            y = function(fused)
            results.append([y, *torch.autograd.grad(y, inputs, pull)])
        for plain, mine in zip(*results, strict=True):
            assert relative(mine, plain) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_fused_logprobs_equal_plain_ones(dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 256, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(151936, 256, device="cuda", dtype=dtype) * 0.1).requires_grad_(True)
    targets = torch.randint(0, 151936, (300,), device="cuda")
    results = []
    for fused in (False, True):
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=temperature, entropy=True, fused=fused)
        assert entropy is not None
        grads = torch.autograd.grad((logprobs + 0.1 * entropy).sum(), (hidden, weight))
        results.append([logprobs, entropy, *grads])
    for plain, mine in zip(*results, strict=True):
        assert relative(mine, plain) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("heads", [(12, 2), (4, 4)])
def test_variable_length_attention_equals_the_exact_fallback(window: int | None, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    lengths = (1, 200, 77, 513, 64, 31)
    query, key, value = (
        torch.randn(sum(lengths), h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (heads[0], heads[1], heads[1])
    )
    segments = Segments(lengths, query.device)
    spec = AttentionSpec(segments, segments, 128**-0.5, window)
    pull = torch.randn(sum(lengths), heads[0], 128, device="cuda", dtype=torch.bfloat16)
    results = []
    for function in (_bucketed, varlen):
        out = function(query, key, value, spec)
        results.append([out, *torch.autograd.grad(out, (query, key, value), pull)])
    for exact, mine in zip(*results, strict=True):
        assert relative(mine, exact) < 1e-2


def test_running_out_of_memory_halves_the_budget_and_keeps_the_loss() -> None:
    options = ModelOptions(
        tiny=TinyOptions(hidden=1024, layers=8, feed_forward=4096, heads=8, kv_heads=4, context=2048)
    )
    rng = np.random.default_rng(0)
    data = [Trajectory(rng.integers(5, 150, 512), np.arange(512) > 0) for _ in range(128)]

    def one_step(budget: int) -> tuple[float, int, list[str]]:
        said: list[str] = []
        policy = build_policy(options, torch.device("cuda"), seed=0)
        learner = Learner(policy, OptimOptions(), token_budget=budget, total_steps=1, say=said.append)
        return learner.step(data, NegativeLogLikelihood()).loss, learner.token_budget, said

    enough, budget, said = one_step(4096)
    assert (budget, said) == (4096, [])
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - 6 * 2**30, dtype=torch.uint8, device="cuda")
    scarce, budget, said = one_step(65536)
    del filler
    assert budget < 65536 and "out of memory" in said[0]
    assert scarce == pytest.approx(enough, rel=1e-3)


def test_the_engine_says_what_the_learner_computes() -> None:
    shape = TinyOptions(hidden=512, layers=4, feed_forward=1024, heads=8, kv_heads=2, context=1024)
    policy = build_policy(ModelOptions(tiny=shape), torch.device("cuda"), seed=0)
    rng = np.random.default_rng(0)
    sampling = Sampling(max_tokens=90, ignore_eos=True)
    prompts = {("r", i): rng.integers(3, 150, int(rng.integers(2, 200))) for i in range(30)}
    work = [Request(key, prompt, sampling, n=3) for key, prompt in prompts.items()]
    together = generate(NativeEngine(policy, seed=1, cache_tokens=60000), work)
    small = NativeEngine(policy, seed=1, cache_tokens=6000)
    assert [c.order for c in generate(small, work)] == [c.order for c in together]
    assert small.scheduler.preemptions > 0
    for completion in together:
        ids = np.concatenate([prompts[completion.key], completion.ids])
        trajectory = Trajectory(ids, np.arange(len(ids)) >= len(prompts[completion.key]))
        with torch.no_grad():
            logprobs = policy.logprobs(TokenBatch.build([trajectory], [0], policy.device))
        assert np.abs(logprobs.cpu().numpy() - completion.logprobs).mean() < 0.03


def engine_requests(count: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(("r", i), rng.integers(3, 150, int(rng.integers(2, 200))), Sampling(max_tokens=40 + i, ignore_eos=True))
        for i in range(count)
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_cache_that_moved_needs_no_new_graphs(precision: str) -> None:
    """Given back, something else in its place, taken again: same tokens through the graphs of before."""
    shape = TinyOptions(hidden=512, layers=4, feed_forward=1024, heads=8, kv_heads=2, context=1024)
    policy = build_policy(ModelOptions(tiny=shape, precision=precision), torch.device("cuda"), seed=0)
    engine = NativeEngine(policy, seed=1, cache_tokens=60000)
    work = engine_requests(30, seed=0)
    before, captures = generate(engine, work), engine.runner.graphs.captures
    assert captures > 0
    held, size, address = torch.cuda.memory_allocated(), engine.cache.bytes, engine.cache.keys.data_ptr()
    dtype = engine.cache.keys.dtype
    engine.release_cache()
    assert torch.cuda.memory_allocated() <= held - size
    fillers = [torch.full(engine.cache.shape, 7.0, dtype=dtype, device="cuda") for _ in range(2)]
    engine.cache.allocate()
    assert engine.cache.keys.data_ptr() != address
    after = generate(engine, work)
    assert engine.runner.graphs.captures == captures
    assert all(bool((filler == 7.0).all()) for filler in fillers), "nobody writes to where the cache was"
    for one, other in zip(before, after, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
    engine.invalidate()
    generate(engine, work)
    assert engine.runner.graphs.captures > captures


def test_another_thread_may_use_the_device_while_graphs_are_captured() -> None:
    shape = TinyOptions(hidden=512, layers=4, feed_forward=1024, heads=8, kv_heads=2, context=1024)
    policy = build_policy(ModelOptions(tiny=shape, precision="bf16"), torch.device("cuda"), seed=0)
    engine, done = NativeEngine(policy, seed=1, cache_tokens=60000), threading.Event()

    def look() -> None:
        stream = torch.cuda.Stream()
        while not done.is_set():
            event = torch.cuda.Event()
            event.record(stream)
            event.query()

    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(look)
        try:
            generate(engine, engine_requests(70, seed=1))
        finally:
            done.set()
        looking.result()
    assert engine.runner.use_graphs and engine.runner.graphs.captures > 1


def test_a_model_that_was_loaded_leaves_no_memory_behind() -> None:
    shape = TinyOptions(hidden=1024, layers=8, feed_forward=4096, heads=8, kv_heads=4, context=256)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    policy = build_policy(ModelOptions(tiny=shape, precision="bf16"), torch.device("cuda"), seed=0)
    weights = sum(p.nbytes for p in policy.module.parameters())
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - before < weights / 2


@pytest.mark.parametrize(("precision", "stop_ids"), [("bf16", ()), ("fp32", (7, 8))])
def test_bursts_launched_ahead_change_nothing(precision: str, stop_ids: tuple[int, ...]) -> None:
    """Where only lengths end a row both ways compute the same batches, so bf16 agrees too; else only up to rounding."""
    shape = TinyOptions(hidden=512, layers=4, feed_forward=1024, heads=8, kv_heads=2, context=1024)
    policy = build_policy(ModelOptions(tiny=shape, precision=precision), torch.device("cuda"), seed=0)
    work = [replace(r, sampling=replace(r.sampling, stop_ids=stop_ids)) for r in engine_requests(70, seed=1)]
    found = []
    for ahead in (False, True):
        engine = NativeEngine(policy, seed=1, cache_tokens=60000, ahead=ahead)
        found.append(generate(engine, work))
        assert (engine.bursts_ahead > 0) == ahead
    assert ("stop" in {c.finish for c in found[0]}) == bool(stop_ids)
    for one, other in zip(*found, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)


def test_deterministic_steps_repeat_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        shape = TinyOptions(hidden=512, layers=4, feed_forward=1024, heads=8, kv_heads=2, context=1024)
        rng = np.random.default_rng(0)
        data = [Trajectory(rng.integers(5, 150, n), np.arange(n) > 0) for n in rng.integers(100, 900, 40)]

        def losses() -> list[float]:
            policy = build_policy(ModelOptions(tiny=shape), torch.device("cuda"), seed=0)
            learner = Learner(policy, OptimOptions(lr=1e-3), token_budget=8192, total_steps=5)
            return [learner.step(data, NegativeLogLikelihood()).loss for _ in range(5)]

        assert losses() == losses()
    finally:
        torch.use_deterministic_algorithms(False)
