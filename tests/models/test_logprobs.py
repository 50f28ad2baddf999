"""Chunked log-probabilities and entropies against plain ones: values and every gradient."""

from __future__ import annotations

import pytest
import torch

from lemma.algorithms.compat import entropy as plain_entropy
from lemma.models import logprobs
from lemma.models.logprobs import map_logits, token_logprobs

ROWS, HIDDEN, WORDS = 7, 5, 11


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"hidden": (ROWS, HIDDEN), "weight": (WORDS, HIDDEN), "bias": (WORDS,)}
    made = {k: torch.randn(s, dtype=torch.float64, requires_grad=True) for k, s in shapes.items()}
    return made | {"targets": torch.randint(0, WORDS, (ROWS,))}


# How families make logits of their head's output: plainly, Cohere or Granite, Gemma, and both at once.
MAPS: list[dict[str, float]] = [{}, {"scale": 0.3}, {"cap": 1.5}, {"scale": 2.5, "cap": 2.0}]


def plain(
    x: dict[str, torch.Tensor], temperature: float, bias: bool, scale: float = 1.0, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (x["hidden"] @ x["weight"].T + (x["bias"] if bias else 0.0)) * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    logits = logits / temperature
    return logits.log_softmax(-1).gather(-1, x["targets"][:, None])[:, 0], plain_entropy(logits)


@pytest.mark.parametrize("chunk", [1, 3, ROWS, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("values", MAPS, ids=str)
def test_chunked_equals_plain(
    inputs: dict[str, torch.Tensor], chunk: int | None, temperature: float, bias: bool, values: dict[str, float]
) -> None:
    names = ["hidden", "weight", *(["bias"] if bias else [])]
    pull = torch.randn(2, ROWS, dtype=torch.float64)
    mine = token_logprobs(
        inputs["hidden"],
        inputs["weight"],
        inputs["targets"],
        temperature=temperature,
        bias_V=inputs["bias"] if bias else None,
        entropy=True,
        chunk=chunk,
        **values,
    )
    theirs = plain(inputs, temperature, bias, **values)
    for a, b in zip(mine, theirs, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    leaves = [inputs[name] for name in names]
    grads = [torch.autograd.grad((pull * torch.stack(list(both))).sum(), leaves) for both in (mine, theirs)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("values", MAPS, ids=str)
def test_gradients_are_those_of_the_function(inputs: dict[str, torch.Tensor], values: dict[str, float]) -> None:
    def function(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = token_logprobs(
            hidden,
            weight,
            inputs["targets"],
            temperature=1.7,
            bias_V=bias,
            entropy=True,
            chunk=3,
            fused=False,
            **values,
        )
        assert both[1] is not None
        return both[0], both[1]

    assert torch.autograd.gradcheck(function, (inputs["hidden"], inputs["weight"], inputs["bias"]))


def test_capped_and_scaled_logits_are_bounded_and_plain_ones_untouched() -> None:
    raw = torch.tensor([-1e4, -1.0, 0.0, 0.5, 1e4]).bfloat16()
    assert map_logits(raw) is raw
    assert map_logits(raw, 0.0625).tolist() == pytest.approx([-624, -0.0625, 0.0, 0.03125, 624], rel=1e-6)
    assert map_logits(raw, cap=30.0).tolist() == pytest.approx([-30, -0.99963, 0.0, 0.49995, 30], abs=1e-5)
    assert map_logits(raw, 2.0, 4.0).tolist() == pytest.approx([-4, -1.84847, 0.0, 0.97967, 4], abs=1e-5)


def test_only_what_is_trained_gets_a_gradient(inputs: dict[str, torch.Tensor]) -> None:
    """With LoRA the head is frozen: no gradient of its size is made."""
    frozen = inputs["weight"].detach()
    values, nothing = token_logprobs(inputs["hidden"], frozen, inputs["targets"])
    values.sum().backward()
    assert nothing is None and frozen.grad is None and inputs["hidden"].grad is not None
    values, _ = token_logprobs(inputs["hidden"].detach(), inputs["weight"], inputs["targets"])
    values.sum().backward()
    assert inputs["weight"].grad is not None


def test_no_more_logits_than_a_chunk_are_ever_held(
    inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    make = logprobs._logits

    def counted(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(len(hidden))
        return make(hidden, weight, bias)

    monkeypatch.setattr(logprobs, "_logits", counted)
    monkeypatch.setattr(logprobs, "HOST_CHUNK_BYTES", 4 * WORDS * 2)
    token_logprobs(inputs["hidden"], inputs["weight"], inputs["targets"])[0].sum().backward()
    assert seen == [2, 2, 2, 1] * 2


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    """A chunk is large: without an entropy nothing else of its size is held with it."""
    logits, targets = torch.randn(4, WORDS), torch.randint(0, WORDS, (4,))
    place, lse = logits.data_ptr(), logits.logsumexp(-1)
    curve = logprobs.Curve(0.7)
    found = logprobs._plain_grad(logits, targets, curve, lse, lse, torch.ones(4), None, torch.float32)
    assert found.data_ptr() == place


def test_chunks_of_a_gpu_begin_at_aligned_addresses_and_those_of_a_cpu_stay() -> None:
    assert logprobs.rows_at_a_time(151936, on_gpu=True) == 880
    assert logprobs.rows_at_a_time(151936, on_gpu=False) == 220
    assert logprobs.rows_at_a_time(10**8, on_gpu=True) == 1


def test_low_precision_adds_up_in_float32() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(9, 16).bfloat16().requires_grad_()
    weight = torch.randn(300, 16).bfloat16().requires_grad_()
    targets = torch.randint(0, 300, (9,))
    values, entropies = token_logprobs(hidden, weight, targets, entropy=True, chunk=2)
    assert entropies is not None and values.dtype == entropies.dtype == torch.float32
    logits = (hidden @ weight.T).float()
    torch.testing.assert_close(values, logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropies, plain_entropy(logits))
    values.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    token_logprobs(wide_hidden, wide_weight, targets)[0].sum().backward()
    for mine, exact in ((hidden.grad, wide_hidden.grad), (weight.grad, wide_weight.grad)):
        assert exact is not None
        assert ((mine.double() - exact).norm() / exact.norm()).item() < 1e-2


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1000.0], [-1000.0], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    values, entropies = token_logprobs(hidden, weight, torch.tensor([0, 0, 2]), entropy=True)
    assert entropies is not None
    assert values.tolist() == pytest.approx([0.0, -2000.0, -torch.log(torch.tensor(3.0)).item()])
    assert entropies.tolist() == pytest.approx([0.0, 0.0, torch.log(torch.tensor(3.0)).item()])
    (values + entropies).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_nothing_in_nothing_out(inputs: dict[str, torch.Tensor]) -> None:
    values, entropies = token_logprobs(inputs["hidden"][:0], inputs["weight"], inputs["targets"][:0], entropy=True)
    assert entropies is not None and values.shape == entropies.shape == (0,)
    values.sum().backward()
    assert inputs["weight"].grad is not None and not inputs["weight"].grad.any()


def test_entropy_is_exact_where_logits_are_far_from_zero() -> None:
    torch.manual_seed(0)
    logits = 60 + 8 * torch.randn(50, 2000, dtype=torch.float64)
    hidden, weight = torch.ones(50, 1), torch.ones(2000, 1)
    for row in logits.float()[:5]:
        _, entropies = token_logprobs(hidden[:1], weight * row[:, None], torch.tensor([0]), entropy=True)
        assert entropies is not None
        wanted = plain_entropy(row.double()[None])
        torch.testing.assert_close(entropies.double(), wanted, rtol=0, atol=2e-5)
