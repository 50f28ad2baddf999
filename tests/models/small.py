"""Small policies and trajectories that several tests share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from lemma.core.types import Output, Trajectory
from lemma.models.load_model import build_policy
from lemma.models.model_options import LoraOptions, ModelOptions, TinyOptions
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy

CPU = torch.device("cpu")
SHAPE = TinyOptions(hidden=32, layers=2, feed_forward=48, heads=4, kv_heads=2, context=128)
WORDS = 96
"""Ids below this are words of the tiny model's vocabulary."""
VALUED = 5
"""The token whose logit is the value of `ValuedPolicy`."""


class ValuedPolicy(Policy):
    """A policy with values as well, the logits of one token, so that any objective can be computed on it."""

    gives = (*Policy.gives, "values")

    def _outputs(self, batch: TokenBatch, names: Collection[Output], temperature: float) -> dict[Output, torch.Tensor]:
        if "values" not in names:
            return super()._outputs(batch, names, temperature)
        assert list(names) == ["values"]
        hidden_NH = self._of_targets(batch)
        values_N = hidden_NH @ self.head.weight[VALUED].to(hidden_NH.dtype)
        return {"values": values_N if values_N.dtype == torch.float64 else values_N.float()}


def tiny_policy(lora: bool | LoraOptions = False, seed: int = 0, **options: Any) -> Policy:
    """The built-in model, shrunk. An adapter starts with both matrices filled, so that every gradient counts."""
    adapter = LoraOptions(r=3, alpha=6) if lora is True else lora or None
    built = build_policy(ModelOptions(tiny=SHAPE, lora=adapter, **options), CPU, seed)
    policy = ValuedPolicy(built.module, built.tokenizer, built._load_base)
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in policy.parameters().items():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=noise) * 0.05)
    return policy


def in_float64(policy: Policy) -> Policy:
    """Double precision, and larger weights: attention and predictions are then far from uniform."""
    policy.module.double()
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if parameter.ndim == 2 and "lora" not in name:
                parameter.mul_(5)
    return policy


def trajectories(lengths: Sequence[int], seed: int = 0, share: float = 0.6) -> list[Trajectory]:
    """Random sequences, two to a group, with every field that an objective reads. The third has nothing to learn."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    made = []
    for number, length in enumerate(lengths):
        chosen = rng.random(length) < share
        chosen[0] = False
        if length > 1 and number != 2:
            chosen[-1] = True
        elif number == 2:
            chosen[:] = False
        made.append(
            Trajectory(
                ids_T=rng.integers(0, WORDS, length),
                loss_mask_T=chosen,
                group_id=number // 2,
                token_fields={
                    "advantage": rng.normal(size=length),
                    **_preference_fields(length, number, noise),
                    **_guided_fields(length, number, seed),
                },
                fields={"sign": 1.0 if number % 2 == 0 else -1.0, "weight": float(rng.random())},
            )
        )
    return made


def _preference_fields(length: int, number: int, noise: np.random.Generator) -> dict[str, np.ndarray]:
    """Of an even, liked sequence the first tokens are a prompt that is learnt as well."""
    is_chosen = number % 2 == 0
    return {
        "reference": -4 * noise.random(length),
        "collision": -2 * noise.random(length),
        "response": (np.arange(length) >= (length // 3 if is_chosen else 0)).astype(np.float64),
        "nll": noise.random(length) / 100 if is_chosen else np.zeros(length),
    }


def _guided_fields(length: int, number: int, seed: int) -> dict[str, np.ndarray]:
    """Of every four sequences the second is a teacher's and the fourth begins with a teacher's tokens."""
    noise = np.random.default_rng((seed, number))
    share = {1: 1.0, 3: 0.5}.get(number % 4, 0.0)
    return {
        "off": (np.arange(length) < share * length).astype(np.float64),
        "value": noise.normal(size=length),
        "return": noise.normal(size=length),
    }


def relative(mine: torch.Tensor, other: torch.Tensor, floor: float = 0.0) -> float:
    """Size of the difference beside the size of `other` (or of `floor`, where that is larger)."""
    scale = max(other.double().norm().item(), floor)
    difference = (mine.double() - other.double()).norm().item()
    return difference / scale if scale else difference
