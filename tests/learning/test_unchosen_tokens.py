"""What a token field says of a token that was not chosen, such as one of a reply, changes no gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lemma.core.types import Trajectory
from lemma.models.policy import Policy
from tests.learning.test_invariance import items_of, one_step
from tests.models.small import in_float64, tiny_policy
from tests.objectives.forms import OBJECTIVES

COUNT = 6


@pytest.fixture(scope="module")
def policy() -> Policy:
    return in_float64(tiny_policy())


@pytest.fixture(scope="module")
def items(policy: Policy) -> list[Trajectory]:
    found = turns_of(items_of(policy))[:COUNT]
    assert any(0 < item.trained_tokens < len(item) - 4 for item in found)
    return found


def turns_of(items: list[Trajectory]) -> list[Trajectory]:
    """The same sequences with replies in between, in which nothing is learnt."""
    return [
        replace(
            item,
            loss_mask_T=item.loss_mask_T & ((np.arange(len(item)) % 7 < 4) | (np.arange(len(item)) == len(item) - 1)),
        )
        for item in items
    ]


def changed(item: Trajectory) -> Trajectory:
    noise = np.random.default_rng(len(item))
    fields = {
        name: np.where(item.loss_mask_T, values, noise.normal(scale=5.0, size=len(values)))
        for name, values in item.token_fields.items()
    }
    return replace(item, token_fields=fields)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_fields_of_unchosen_tokens_change_no_gradient(policy: Policy, items: list[Trajectory], name: str) -> None:
    whole = one_step(policy, items, OBJECTIVES[name](), budget=200)
    other = one_step(policy, [changed(item) for item in items], OBJECTIVES[name](), budget=200)
    assert other.report.loss == whole.report.loss
    for parameter, grad in whole.grads.items():
        assert torch.equal(other.grads[parameter], grad), parameter
