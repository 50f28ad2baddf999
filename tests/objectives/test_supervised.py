"""The three divisors of the negative log-likelihood, with numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from lemma.algorithms.compat import masked_mean, masked_normalize
from lemma.objectives import LossInputs, NegativeLogLikelihood, Totals


def terms(totals: Totals | None = None) -> LossInputs:
    """Three sequences: log-probabilities -1 -2 -3, -4, and none at all."""
    return LossInputs(
        outputs={"logprobs": torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64, requires_grad=True)},
        sequence_N=torch.tensor([0, 0, 0, 1]),
        group_B=torch.tensor([0, 0, 1]),
        totals=totals or Totals(4.0, 3.0, 2.0),
    )


@pytest.mark.parametrize(
    ("objective", "value", "grad"),
    [
        (NegativeLogLikelihood("token"), 10 / 4, [1 / 4] * 4),
        (NegativeLogLikelihood("sequence"), (2 + 4) / 3, [1 / 9, 1 / 9, 1 / 9, 1 / 3]),
        (NegativeLogLikelihood("constant", 5.0), 10 / 15, [1 / 15] * 4),
    ],
)
def test_value_and_gradient(objective: NegativeLogLikelihood, value: float, grad: list[float]) -> None:
    given = terms()
    loss = objective(given)
    assert loss.value.item() == pytest.approx(value, rel=1e-15)
    (pulled,) = torch.autograd.grad(loss.value, given.logprobs_N)
    assert (-pulled).tolist() == pytest.approx(grad, rel=1e-15)
    total, count = loss.metrics["nll"]
    assert (float(total), count) == (10.0, 4.0)


def test_the_divisor_is_that_of_the_step_and_not_of_the_pack() -> None:
    assert NegativeLogLikelihood("token")(terms(Totals(40.0, 30.0, 20.0))).value.item() == pytest.approx(0.25)
    assert NegativeLogLikelihood("sequence")(terms(Totals(40.0, 30.0, 20.0))).value.item() == pytest.approx(0.2)


def test_scopes() -> None:
    assert [NegativeLogLikelihood(n).scope for n in ("token", "sequence", "constant")] == ["token", "sequence", "token"]


def test_what_the_mask_hides_does_not_matter() -> None:
    hidden = torch.tensor([[1.0, float("nan")], [float("inf"), 4.0]])
    mask = torch.tensor([[1, 0], [0, 1]])
    assert masked_normalize(hidden, mask, normalize_constant=5.0).item() == 1.0
    assert masked_mean(hidden, mask, dim=1).tolist() == [1.0, 4.0]
    assert masked_mean(hidden, torch.zeros(2, 2)).isnan()
