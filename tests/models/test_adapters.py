"""Adapters inside the joint products of an engine: what the layers give by themselves, and parameters as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lemma.core.types import Trajectory
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Completion, Request, Sampling, generate
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.adapters import fold_adapters, folded
from lemma.models.load_model import build_policy
from lemma.models.model_options import LoraOptions, ModelOptions, Precision, TinyOptions
from lemma.models.policy import Policy
from lemma.objectives import NegativeLogLikelihood

SHAPE = TinyOptions(hidden=32, layers=2, feed_forward=64, heads=4, kv_heads=2, context=64)


def adapted_policy(targets: Any = "all-linear", precision: Precision = "fp32") -> Policy:
    """A tiny model whose adapters add something."""
    options = ModelOptions(
        path="tiny", tiny=SHAPE, lora=LoraOptions(r=3, alpha=6, targets=targets), precision=precision
    )
    policy = build_policy(options, torch.device("cpu"), seed=3)
    torch.manual_seed(5)
    for name, parameter in policy.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return policy


def spoken(policy: Policy) -> list[Completion]:
    engine = NativeEngine(policy, cache_tokens=512, seed=1)
    requests = [Request(("r", i), torch.arange(5 + i).numpy(), Sampling(max_tokens=12)) for i in range(3)]
    return generate(engine, requests)


@pytest.mark.parametrize(("targets", "tensors"), [("all-linear", 8), (["q_proj", "k_proj", "v_proj", "down_proj"], 4)])
def test_an_engine_says_the_same_with_folded_adapters(targets: Any, tensors: int) -> None:
    before = spoken(adapted_policy(targets))
    policy = adapted_policy(targets)
    assert fold_adapters(policy.module) == fold_adapters(policy.module) == tensors
    policy.module.eval()
    with torch.no_grad():
        assert folded(policy.causal.model.layers[0].self_attn, ("q_proj", "k_proj", "v_proj")) is not None
    after = spoken(policy)
    for one, other in zip(before, after, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert abs(one.logprobs - other.logprobs).max() < 1e-5


def test_parameters_stay_what_they_were(tmp_path: Path) -> None:
    policy = adapted_policy()
    before = {name: parameter.clone() for name, parameter in policy.module.named_parameters()}
    kept = dict(policy.module.named_parameters())
    fold_adapters(policy.module)
    for name, parameter in policy.module.named_parameters():
        assert parameter is kept[name] and parameter.is_contiguous() and torch.equal(parameter, before[name]), name
    policy.module.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "adapter_model.safetensors")
    adapter = {name.replace(".default", ""): value for name, value in before.items() if "lora" in name}
    assert set(adapter) == set(saved) and all(torch.equal(saved[name], value) for name, value in adapter.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_learnt_after_folding_is_said(precision: Precision) -> None:
    """An engine reads the weights of the last step, wherever the learner's optimiser was made."""
    plain, folding = adapted_policy(precision=precision), adapted_policy(precision=precision)
    rows = [Trajectory(np.arange(3, 20), np.arange(17) > 2)]
    for policy in (plain, folding):
        learner = Learner(policy, OptimOptions(lr=0.05), token_budget=64, total_steps=3)
        if policy is folding:
            assert fold_adapters(policy.module) == 8
        for _ in range(2):
            learner.step(rows, NegativeLogLikelihood())
    for (name, one), other in zip(plain.module.named_parameters(), folding.module.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert [one.ids.tolist() for one in spoken(plain)] == [one.ids.tolist() for one in spoken(folding)]


def test_a_weight_that_was_moved_is_seen() -> None:
    policy = adapted_policy()
    policy.module.eval()
    fold_adapters(policy.module)
    part = policy.causal.model.layers[1].mlp
    with torch.no_grad():
        assert folded(part, ("down_proj",)) is not None
        weight = part.down_proj.lora_A["default"].weight
        weight.data = weight.data.clone()
        assert folded(part, ("down_proj",)) is None and folded(part, ("gate_proj", "up_proj")) is not None
    assert folded(part, ("gate_proj", "up_proj")) is None, "a learner computes each layer by itself"
