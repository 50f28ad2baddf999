"""LUFFY's loss where the originals' formula has nothing to divide by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lemma.objectives import LossInputs, Totals
from lemma.objectives.mixed import Compat, MixedPolicyLoss


def taught(count: int) -> LossInputs:
    """A pack of one sequence, all of it a teacher's."""
    ones = torch.ones(count, dtype=torch.float64)
    return LossInputs(
        outputs={"logprobs": torch.full((count,), -0.01, dtype=torch.float64, requires_grad=True)},
        sequence_N=torch.zeros(count, dtype=torch.long),
        group_B=torch.zeros(1, dtype=torch.long),
        totals=Totals(float(count), 1.0, 1.0),
        tokens={"advantage": ones, "off": ones},
    )


@pytest.mark.parametrize("options", [{"sft": 1.0}, {"skip_above": 0.5}], ids=str)
def test_a_pack_in_which_nothing_counts_is_worth_nothing(options: dict[str, float]) -> None:
    """Where all tokens are imitated, or all are left out, the mean over the others is 0 and not a number."""
    loss = replace(MixedPolicyLoss(normalise="token", compat=Compat()), **options)  # type: ignore[arg-type]
    given = taught(3)
    value = loss(given).value
    assert value.item() == pytest.approx(0.01 if "sft" in options else 0.0)
    (pulled,) = torch.autograd.grad(value, given.logprobs_N)
    assert torch.isfinite(pulled).all()
