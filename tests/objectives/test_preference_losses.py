"""What holds for every loss of DPO, whatever its formula."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.pair_losses import OF_RANKS, LossName
from lemma.algorithms.preference import Dpo
from lemma.objectives import LossInputs, Totals
from lemma.objectives.preference.dpo_losses import FORMULAS, SORTED

LOSSES = get_args(LossName)
PAIRS = 5


def test_the_options_know_every_formula() -> None:
    assert set(LOSSES) == set(FORMULAS) and OF_RANKS == SORTED


def loss_in_order(algorithm: Dpo, order: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a step whose pairs stand in this order, and its gradient by pair."""
    generator = torch.Generator().manual_seed(1)
    mine, reference, collision = torch.randn(3, 2, PAIRS, dtype=torch.float64, generator=generator) * 3 - 5
    mine.requires_grad_()
    both = torch.tensor([*order, *(PAIRS + place for place in order)])
    terms = LossInputs(
        outputs={"logprobs": mine.flatten()[both]},
        sequence_N=torch.arange(2 * PAIRS),
        group_B=torch.arange(2 * PAIRS) % PAIRS,
        totals=Totals(2 * PAIRS, 2 * PAIRS, PAIRS),
        tokens={"reference": reference.flatten()[both], "collision": collision.flatten()[both]},
        fields={"sign": torch.tensor([1.0] * PAIRS + [-1.0] * PAIRS, dtype=torch.float64)},
    )
    value = algorithm.objective(AlgorithmState())(terms).value
    value.backward()
    assert mine.grad is not None
    return value.detach(), mine.grad


@pytest.mark.parametrize("weighting", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_order_of_the_pairs_does_not_matter(loss: LossName, weighting: bool) -> None:
    if weighting and loss in OF_RANKS:
        with pytest.raises(ValidationError, match=f"{loss} sorts the pairs"):
            Dpo(loss=loss, weighting=weighting)
        return
    algorithm = Dpo(loss=loss, weighting=weighting)
    value, grad = loss_in_order(algorithm, [0, 1, 2, 3, 4])
    moved, moved_grad = loss_in_order(algorithm, [3, 1, 4, 0, 2])
    torch.testing.assert_close(moved, value)
    torch.testing.assert_close(moved_grad, grad)


@pytest.mark.parametrize("margin", [-2000.0, -900.0, 900.0, 2000.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_far_pairs_have_a_finite_loss_and_gradient(loss: LossName, margin: float) -> None:
    """Float32, all of the margin on either side."""
    for chosen, rejected in ((margin, 0.0), (0.0, -margin)):
        mine = torch.tensor([chosen, rejected], requires_grad=True)
        terms = LossInputs(
            outputs={"logprobs": mine},
            sequence_N=torch.arange(2),
            group_B=torch.zeros(2, dtype=torch.long),
            totals=Totals(2, 2, 1),
            tokens={"reference": torch.zeros(2)},
            fields={"sign": torch.tensor([1.0, -1.0])},
        )
        value = Dpo(loss=loss).objective(AlgorithmState())(terms).value
        (grad,) = torch.autograd.grad(value, mine)
        assert torch.isfinite(value) and torch.isfinite(grad).all(), (value, grad)
