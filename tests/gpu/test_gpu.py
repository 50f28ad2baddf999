"""What only a GPU can show: fused kernels and variable-length attention against plain code, real lack of memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lemma.core.types import Trajectory
from lemma.models.attention import _bucketed, varlen
from lemma.models.blocks import gated, rms_norm
from lemma.models.load import build_policy
from lemma.models.logprobs import token_logprobs
from lemma.models.options import ModelOptions, TinyOptions
from lemma.models.packing import Segments
from lemma.objectives import NegativeLogLikelihood
from lemma.training.learner import Learner
from lemma.training.options import OptimOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


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
        torch.randn(h, sum(lengths), 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (heads[0], heads[1], heads[1])
    )
    segments = Segments(lengths, query.device)
    pull = torch.randn(sum(lengths), heads[0], 128, device="cuda", dtype=torch.bfloat16)
    results = []
    for function in (_bucketed, varlen):
        out = function(query, key, value, segments, 128**-0.5, window)
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
