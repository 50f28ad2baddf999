"""Schedules, master weights, loss scaling, clipping, weight decay, and states that go on exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lemma.core.errors import UserError
from lemma.learning.learning_options import OptimOptions
from lemma.learning.loss_scaler import SCALE_START, LossScaler
from lemma.learning.optimiser import Optimiser, learning_rate
from lemma.learning.optimiser_state import load_optimiser, optimiser_state

LINEAR = {"schedule": "linear", "lr": 1.0}
COSINE = {"schedule": "cosine", "lr": 1.0}


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"lr": 0.2}, [0.2, 0.2, 0.2, 0.2]),
        ({"lr": 0.2, "warmup": 2}, [0.1, 0.2, 0.2, 0.2]),
        ({"lr": 0.2, "warmup": 0.5}, [0.1, 0.2, 0.2, 0.2]),
        ({"lr": 0.3, "warmup": 0.375}, [0.2, 0.3, 0.3, 0.3]),
        ({"lr": 0.2, "warmup": 8}, [0.025, 0.05, 0.075, 0.1]),
        (LINEAR, [1.0, 0.75, 0.5, 0.25]),
        (LINEAR | {"warmup": 1}, [1.0, 1.0, 2 / 3, 1 / 3]),
        (LINEAR | {"final_lr": 0.2}, [1.0, 0.8, 0.6, 0.4]),
        (COSINE, [0.5 + 0.5 * math.cos(math.pi * k / 4) for k in range(4)]),
        (COSINE | {"warmup": 2, "final_lr": 0.5}, [0.5, 1.0, 1.0, 0.75]),
        ({"lr": 0.0, "schedule": "cosine"}, [0.0] * 4),
    ],
)
def test_schedules(options: dict[str, Any], rates: list[float]) -> None:
    assert [learning_rate(OptimOptions(**options), step, 4) for step in range(4)] == pytest.approx(rates)


def test_schedules_end_where_they_should() -> None:
    for schedule in ("linear", "cosine"):
        options = OptimOptions(lr=1.0, schedule=schedule, final_lr=0.1)
        assert learning_rate(options, 100, 100) == pytest.approx(0.1)
        assert learning_rate(options, 500, 100) == pytest.approx(0.1)
    assert learning_rate(OptimOptions(lr=1.0, schedule="linear", warmup=1), 0, 1) == 1.0


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        "matrix": nn.Parameter(torch.randn(70, 70).to(dtype)),
        "vector": nn.Parameter(torch.randn(8).to(dtype)),
    }


def pull(given: dict[str, nn.Parameter], size: float = 1.0, seed: int = 1) -> None:
    """Back-propagate a fixed gradient."""
    torch.manual_seed(seed)
    loss = sum((p * (size * torch.randn(p.shape)).to(p.dtype)).sum() for p in given.values())
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def test_weight_decay_is_for_matrices_only() -> None:
    given = parameters()
    before = {name: p.detach().clone() for name, p in given.items()}
    optimiser = Optimiser(given, OptimOptions(lr=0.1, weight_decay=0.5, clip=0.0))
    for p in given.values():
        p.grad = torch.zeros_like(p)
    optimiser.step(0.1)
    torch.testing.assert_close(given["matrix"].detach(), before["matrix"] * (1 - 0.1 * 0.5))
    assert torch.equal(given["vector"], before["vector"])


def test_clipping_scales_the_whole_gradient() -> None:
    """AdamW forgets the size of a constant gradient, so its first moment is looked at."""
    moments = {}
    for clip in (0.0, 2.0, 1e9):
        given = parameters()
        optimiser = Optimiser(given, OptimOptions(clip=clip))
        pull(given)
        grads = {name: p.grad.clone() for name, p in given.items() if p.grad is not None}
        size, finite = optimiser.step(1e-3)
        expected = torch.cat([g.flatten() for g in grads.values()]).norm().item()
        assert finite and size == pytest.approx(expected, rel=1e-6)
        moments[clip] = optimiser.inner.state[given["matrix"]]["exp_avg"]
    torch.testing.assert_close(moments[0.0], moments[1e9])
    torch.testing.assert_close(moments[2.0], moments[0.0] * 2.0 / expected)


def test_master_weights_keep_what_bf16_would_lose() -> None:
    """At lr 1e-6 one update is far below the resolution of bf16; many of them are not."""
    given = {"w": nn.Parameter(torch.full((4, 4), 0.25, dtype=torch.bfloat16))}
    optimiser = Optimiser(given, OptimOptions(lr=1e-6, clip=0.0))
    address = given["w"].data_ptr()
    master = optimiser.masters["w"]
    for step in range(1, 701):
        given["w"].sum().backward()
        assert given["w"].grad is None, "the low-precision gradient must not be kept"
        optimiser.step(1e-6)
        if step == 1:
            assert given["w"][0, 0].item() == 0.25 and master[0, 0].item() == pytest.approx(0.25 - 1e-6, abs=1e-7)
    assert master[0, 0].item() == pytest.approx(0.25 - 7e-4, rel=1e-4)
    assert given["w"][0, 0].item() == torch.tensor(0.25 - 7e-4).bfloat16().item() < 0.25
    assert given["w"].data_ptr() == address and master.dtype == torch.float32


def test_low_precision_gradients_add_up_in_float32() -> None:
    given = {"w": nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))}
    optimiser = Optimiser(given, OptimOptions())
    for size in (1.0, *[1 / 512] * 64):
        (given["w"] * size).sum().backward()
    grad = optimiser.masters["w"].grad
    assert grad is not None and grad.item() == 1.0 + 64 / 512, "in bf16 the sum would stay at 1"
    optimiser.zero()
    assert grad.item() == 0.0 and optimiser.masters["w"].grad is grad


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    given = parameters(torch.float16)
    optimiser = Optimiser(given, OptimOptions(lr=1.0))
    assert optimiser.scaler.scale == SCALE_START == 65536.0
    before = {name: p.detach().clone() for name, p in given.items()}
    pull(given, size=60000.0)
    size, finite = optimiser.step(1.0)
    assert not finite and not math.isfinite(size)
    assert optimiser.scaler.scale == SCALE_START / 2
    assert all(torch.equal(p, before[name]) for name, p in given.items())
    assert not optimiser.inner.state, "nothing may be updated"
    pull(given, size=1e-3)
    size, finite = optimiser.step(1.0)
    assert finite and not torch.equal(given["matrix"], before["matrix"])
    assert math.isfinite(size)


def test_the_scale_is_taken_out_again() -> None:
    """A gradient too small for fp16 arrives whole, and is clipped by its true size."""
    given = {"w": nn.Parameter(torch.ones(4, 4, dtype=torch.float16))}
    optimiser = Optimiser(given, OptimOptions(clip=2.0**-26))
    (given["w"].float().sum() * 2.0**-27 * optimiser.scaler.scale).backward()
    size, finite = optimiser.step(1e-3)
    assert finite and size == 4 * 2.0**-27
    moment = optimiser.inner.state[optimiser.masters["w"]]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((4, 4), 0.1 * 2.0**-28), rtol=1e-6, atol=0.0)


def test_the_scale_grows_after_long_peace_and_never_falls_below_one() -> None:
    scaler = LossScaler(True)
    for _ in range(1999):
        scaler.update(True)
    assert scaler.scale == SCALE_START
    scaler.update(True)
    assert scaler.scale == 2 * SCALE_START
    for _ in range(40):
        scaler.update(False)
    assert scaler.scale == 1.0 and scaler.good_steps == 0
    idle = LossScaler(False)
    idle.update(False)
    assert idle.scale == 1.0


def test_a_gradient_that_is_no_number_changes_nothing() -> None:
    given = parameters()
    before = given["matrix"].detach().clone()
    optimiser = Optimiser(given, OptimOptions())
    pull(given, size=float("nan"))
    size, finite = optimiser.step(1.0)
    assert math.isnan(size) and not finite and torch.equal(given["matrix"], before)
    assert all(p.grad is None for p in given.values()), "the next step must start clean"


def test_rmsprop_is_that_of_torch() -> None:
    """The same weights after every step; weight decay is added to the gradient, on matrices only."""
    mine, theirs = parameters(torch.float32), parameters(torch.float32)
    options = {"lr": 1e-2, "smoothing": 0.9, "eps": 1e-6, "weight_decay": 0.1, "clip": 0.0}
    optimiser = Optimiser(mine, OptimOptions(name="rmsprop", **options))
    groups = [
        {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.RMSprop(groups, lr=1e-2, alpha=0.9, eps=1e-6)
    for step in range(4):
        pull(mine, seed=step)
        pull(theirs, seed=step)
        optimiser.step(1e-2)
        plain.step()
        plain.zero_grad()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "rmsprop", "betas": (0.9, 0.99)}, "rmsprop has no betas; write `smoothing"),
        ({"smoothing": 0.9}, "adamw has no smoothing; write betas, or `name: rmsprop`"),
    ],
)
def test_decay_rates_of_another_optimiser(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OptimOptions(**options)


KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "rmsprop": (torch.float32, {"name": "rmsprop"}),
    "rmsprop under bf16": (torch.bfloat16, {"name": "rmsprop"}),
    "8 bit": (torch.float32, {"name": "adamw_8bit"}),
    "8 bit under bf16": (torch.bfloat16, {"name": "adamw_8bit"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_to_the_last_bit(kind: str) -> None:
    dtype, options = KINDS[kind]
    optim = OptimOptions(lr=1e-2, weight_decay=0.1, **options)

    def train(optimiser: Optimiser, steps: range) -> None:
        for step in steps:
            pull(optimiser.parameters, size=1.0 / optimiser.scaler.scale if step else 1e6, seed=step)
            optimiser.step(1e-2)

    through = Optimiser(parameters(dtype), optim)
    train(through, range(3))
    saved, extra = optimiser_state(through)
    saved = {name: tensor.clone() for name, tensor in saved.items()}
    assert extra == _through_json(extra)
    train(through, range(3, 6))

    resumed = Optimiser({name: nn.Parameter(torch.zeros_like(p)) for name, p in parameters(dtype).items()}, optim)
    addresses = {name: p.data_ptr() for name, p in resumed.parameters.items()}
    load_optimiser(resumed, saved, _through_json(extra))
    for name, p in resumed.parameters.items():
        assert torch.equal(p, saved[f"weight/{name}"].to(dtype)), "the compute weights must be those of the masters"
    train(resumed, range(3, 6))
    assert {name: p.data_ptr() for name, p in resumed.parameters.items()} == addresses
    for a, b in zip(optimiser_state(through), optimiser_state(resumed), strict=True):
        assert _as_lists(a) == _as_lists(b)
    for name, p in through.parameters.items():
        assert torch.equal(p, resumed.parameters[name])
    if kind.startswith("8 bit"):
        assert through.inner.state[through.masters["matrix"]]["state1"].dtype == torch.uint8
    if kind == "fp16":
        assert through.scaler.scale == SCALE_START / 2, "the first step of this test overflows"


def _through_json(extra: dict[str, Any]) -> dict[str, Any]:
    import json

    return json.loads(json.dumps(extra))


def _as_lists(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def test_loading_forgets_what_was_there() -> None:
    given = parameters()
    optimiser = Optimiser(given, OptimOptions(lr=1e-2))
    fresh, extra = optimiser_state(optimiser)
    fresh = {name: tensor.clone() for name, tensor in fresh.items()}
    pull(given)
    optimiser.step(1e-2)
    load_optimiser(optimiser, fresh, extra)
    assert not optimiser.inner.state


SPOIL: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "no such tensor": lambda tensors: tensors.pop("weight/vector"),
    "shape (9,)": lambda tensors: tensors.update({"weight/vector": torch.zeros(9)}),
}


@pytest.mark.parametrize("said", SPOIL)
def test_a_state_of_another_model_is_refused_before_anything_changes(said: str) -> None:
    given = parameters()
    before = given["matrix"].detach().clone()
    optimiser = Optimiser(given, OptimOptions())
    tensors, extra = optimiser_state(optimiser)
    tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    SPOIL[said](tensors)
    with pytest.raises(UserError, match=r"the checkpoint is of another model: vector is \(8,\) here and") as caught:
        load_optimiser(optimiser, tensors, extra)
    assert said in str(caught.value) and torch.equal(given["matrix"], before)
