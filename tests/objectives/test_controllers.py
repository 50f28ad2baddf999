"""Weights that follow what is measured, and their state."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lemma.objectives.controllers import AdaptiveKl, LearnedEntropy


def test_a_learned_weight_takes_the_steps_of_adamw() -> None:
    control = LearnedEntropy(0.01, target=1.0, lr=0.05, decay=0.02)
    log_alpha = torch.tensor(math.log(0.01), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.AdamW([log_alpha], lr=0.05, weight_decay=0.02)
    for entropy in (1.4, 0.7, 0.9, 2.0, 1.0):
        adam.zero_grad()
        ((entropy - 1.0) * log_alpha.exp()).backward()
        adam.step()
        control.update(entropy)
        assert control.log_alpha == pytest.approx(log_alpha.item(), rel=1e-12)
        assert control.coefficient == pytest.approx(log_alpha.exp().item(), rel=1e-12)


def test_too_little_entropy_raises_its_weight_until_the_limit() -> None:
    control = LearnedEntropy(0.01, target=1.0, limit=0.0101, lr=0.1, decay=0.0)
    control.update(0.2)
    assert control.coefficient == 0.0101
    moved = control.log_alpha
    assert moved == pytest.approx(math.log(0.01) + 0.1, rel=1e-6)
    assert control.gradient(0.2) == 0.0


def test_their_state_is_json_and_goes_on_exactly() -> None:
    entropy, kl = LearnedEntropy(0.01), AdaptiveKl(0.05, target=0.1, horizon=10)
    for value in (0.3, 0.8):
        entropy.update(value)
        kl.update(value, 4)
    entropy_again, kl_again = LearnedEntropy(0.5), AdaptiveKl(0.5, target=0.1, horizon=10)
    entropy_again.load(json.loads(json.dumps(entropy.state())))
    kl_again.load(json.loads(json.dumps(kl.state())))
    for value in (1.7, 0.1):
        entropy.update(value)
        entropy_again.update(value)
        kl.update(value, 4)
        kl_again.update(value, 4)
    assert entropy_again.log_alpha == entropy.log_alpha
    assert kl_again.coefficient == kl.coefficient != 0.05
