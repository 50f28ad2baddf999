"""The policy loss and group advantages, with numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lemma.algorithms.parts.each_reward import summed_advantages, total_rewards
from lemma.algorithms.parts.flat_advantages import group_advantages
from lemma.objectives import LossInputs, Totals
from lemma.objectives.controllers import adapted_coefficient
from lemma.objectives.policy_loss import (
    CappedWeight,
    Clip,
    GammaWeight,
    KlKind,
    MismatchWeight,
    PolicyLoss,
    SoftGate,
    Unclipped,
    kl_estimate,
    quantile,
)

NAN = math.nan


def terms(**tokens: list[float]) -> LossInputs:
    """Three sequences of two, one and no tokens."""
    given = {"advantage": [1.0, 1.0, -1.0], **tokens}
    return LossInputs(
        outputs={"logprobs": torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)},
        sequence_N=torch.tensor([0, 0, 1]),
        group_B=torch.tensor([0, 0, 1]),
        totals=Totals(3.0, 3.0, 2.0),
        tokens={name: torch.tensor(values, dtype=torch.float64) for name, values in given.items()},
    )


def test_used_once_the_ratio_is_one_and_the_gradient_that_of_reinforce() -> None:
    given = terms()
    loss = PolicyLoss(Clip.around(0.2), normalise="sequence")(given)
    assert loss.value.item() == pytest.approx((-1 + 1) / 3)
    (pulled,) = torch.autograd.grad(loss.value, given.logprobs_N)
    assert pulled.tolist() == pytest.approx([-1 / 6, -1 / 6, 1 / 3])
    assert "ratio/mean" not in loss.metrics and not loss.maxima


def test_a_cut_support_is_not_a_fall() -> None:
    """The sampler drew from half of the mass, so each token was twice as likely to it; the policy has not moved."""
    half = math.log(0.5)
    behaviour = [-1.0 - half, -2.0 - half, -3.0 - half]
    whole = PolicyLoss(off_policy_limit=0.1)
    assert whole(terms(sampler_logprobs=behaviour, log_kept_mass=[half] * 3)).value.item() == pytest.approx(
        (-2 + 1) / 3
    )
    assert whole(terms(sampler_logprobs=behaviour)).value.item() == pytest.approx(-2 / 3), "a fall by log 2 is left out"


def test_a_cut_weight_is_counted_whatever_the_sign_of_the_advantage() -> None:
    """Ratios e^1, e^0, e^2 with the advantages 1, 1, -1, cut at 2."""
    loss = PolicyLoss(CappedWeight(2.0))(terms(old=[-2.0, -2.0, -5.0]))
    shares = {name: float(total) / float(count) for name, (total, count) in loss.metrics.items() if "clip" in name}
    assert shares == pytest.approx({"clip/high": 1 / 3, "clip/region": 2 / 3})


def test_metrics_and_maxima() -> None:
    given = terms(old=[-1.5, -2.0, -2.5], sampler_logprobs=[-1.5, -2.25, -2.0])
    loss = PolicyLoss(Clip.around(0.2))(given)
    means = {name: float(total) / float(count) for name, (total, count) in loss.metrics.items()}
    up, down = math.exp(0.5), math.exp(-0.5)
    assert means == pytest.approx(
        {
            "surprisal": 2.0,
            "ratio/mean": (up + 1 + down) / 3,
            "kl/old": (up - 1 - 0.5 + down - 1 + 0.5) / 3,
            "clip/low": 1 / 3,
            "clip/high": 1 / 3,
            "clip/region": 2 / 3,
            "mismatch/mean": 0.25,
        }
    )
    assert {name: value.item() for name, value in loss.maxima.items()} == pytest.approx(
        {"ratio/max": up, "mismatch/max": 0.5}
    )


def test_a_pack_without_a_token_gives_nothing() -> None:
    empty = terms(old=[0.0] * 3, sampler_logprobs=[0.0] * 3)
    nothing = torch.zeros(0, dtype=torch.float64)
    empty = LossInputs(
        outputs={"logprobs": nothing.requires_grad_(), "entropy": nothing},
        sequence_N=torch.zeros(0, dtype=torch.long),
        group_B=empty.group_B,
        totals=empty.totals,
        tokens=dict.fromkeys(("advantage", "old", "sampler_logprobs"), nothing),
    )
    for objective in (PolicyLoss(), PolicyLoss(level="sequence", top_entropy=0.5, entropy=0.1, off_policy_limit=0.1)):
        loss = objective(empty)
        assert loss.value.item() == 0.0 and not loss.maxima


def test_a_huge_ratio_stays_a_number() -> None:
    given = terms(old=[-200.0, -2.0, -300.0], advantage=[1.0, 1.0, 0.0])
    for objective in (PolicyLoss(), PolicyLoss(Unclipped(), level="trajectory"), PolicyLoss(SoftGate())):
        loss = objective(given)
        (pulled,) = torch.autograd.grad(loss.value, given.logprobs_N)
        assert loss.value.isfinite() and pulled.isfinite().all()


def test_the_levels_of_a_ratio() -> None:
    given = terms(old=[-1.5, -2.25, -3.5])
    for level, first in (("token", [math.exp(0.5), math.exp(0.25)]), ("sequence", [math.exp(0.375)] * 2)):
        (pulled,) = torch.autograd.grad(
            -PolicyLoss(Unclipped(), level=level)(given).value,  # type: ignore[arg-type]
            given.logprobs_N,
        )
        assert (3 * pulled).tolist() == pytest.approx([*first, -math.exp(0.5)])
    product = PolicyLoss(Unclipped(), level="trajectory", normalise="sequence")(given)
    assert product.value.item() == pytest.approx(-(math.exp(0.75) - math.exp(0.5)) / 3)


def test_a_quantile_is_that_of_torch_and_has_no_largest_size() -> None:
    torch.manual_seed(0)
    for size in (1, 2, 10, 1001):
        for kind in (torch.float32, torch.float64):
            values = torch.randn(size, dtype=kind)
            for share in (0.0, 0.3, 0.8, 1.0):
                assert torch.equal(quantile(values, share), torch.quantile(values, share))
    many = (torch.arange(2**24 + 1) % 2).half()
    assert [quantile(many, share).item() for share in (0.25, 0.75)] == [0.0, 1.0]


def test_scopes() -> None:
    assert PolicyLoss().scope == "token"
    assert PolicyLoss(mismatch=MismatchWeight("token")).scope == "token"
    for whole in (
        PolicyLoss(normalise="sequence"),
        PolicyLoss(level="sequence"),
        PolicyLoss(off_policy_limit=1.0),
        PolicyLoss(mismatch=MismatchWeight("sequence")),
    ):
        assert whole.scope == "sequence"
    assert PolicyLoss(top_entropy=0.5).scope == "batch"
    with pytest.raises(AssertionError):
        PolicyLoss(GammaWeight(), level="token")


def test_the_gamma_weight_is_one_where_nothing_has_changed() -> None:
    ratio, advantage = torch.tensor([1.0, 1.0, 2.0, 0.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    weight = GammaWeight().weight(ratio, advantage)
    assert weight.tolist() == pytest.approx([1.0, 1.0, 4 * math.exp(-3), 1e-24 * math.exp(2)], rel=1e-4, abs=1e-20)


# --- KL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("k1", [0.5, -12.0]),
        ("k2", [0.125, 72.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(12.0) - 13]),
        ("low_var_kl", [math.exp(-0.5) - 0.5, 10.0]),
        ("abs", [0.5, 12.0]),
        ("weighted", [1.0, -24.0]),
    ],
)
def test_kl_estimates(kind: KlKind, want: list[float]) -> None:
    current, reference = torch.tensor([-1.0, -13.0]).double(), torch.tensor([-1.5, -1.0]).double()
    assert kl_estimate(kind, current, reference, ratio=torch.tensor(2.0)).tolist() == pytest.approx(want)
    limited = kl_estimate(kind, current, reference, ratio=torch.tensor(2.0), limit=0.5)
    if kind == "k1":
        assert limited.tolist() == [0.5, -0.5]


def test_the_weight_of_a_kl_follows_its_target() -> None:
    assert adapted_coefficient(0.2, 3.0, target=1.0, horizon=100, samples=10) == pytest.approx(0.2 * 1.02)
    assert adapted_coefficient(0.2, 0.9, target=1.0, horizon=100, samples=10) == pytest.approx(0.2 * 0.99)


# --- advantages ------------------------------------------------------------------------------------------------------


def test_a_constant_group_has_advantage_exactly_zero() -> None:
    rewards = [0.1, 0.1, 0.1, 0.3, 0.1 + 0.2, 7.0]
    found = group_advantages(rewards, [0, 0, 0, 1, 1, 2], scale="group", epsilon=0.0)
    assert found.tolist()[:3] == [0.0] * 3 and found[5] == 0.0
    assert np.abs(found).max() < 1e-9, "a rounding is no difference"
    assert group_advantages([0.1] * 3, [0] * 3, scale="batch").tolist() == [0.0] * 3


def test_a_group_of_one_is_its_own_score_in_compat_only() -> None:
    assert group_advantages([0.7, 1.0, 0.0], ["a", "b", "b"]).tolist() == [0.0, 0.5, -0.5]
    assert group_advantages([0.7, 1.0, 0.0], ["a", "b", "b"], compat=True).tolist() == [0.7, 0.5, -0.5]


def test_statistics_of_some_rows_only() -> None:
    """Teachers' rows are compared with the policy's and do not count themselves."""
    found = group_advantages([1.0, 0.0, 1.0], [0, 0, 0], counted_R=[False, True, True])
    assert found.tolist() == [0.5, -0.5, 0.5]
    unscaled = group_advantages([1.0, 0.0, 0.0], [0, 0, 0], counted_R=[False, True, True], scale="group", epsilon=0.0)
    assert unscaled.tolist() == [1.0, 0.0, 0.0]
    assert group_advantages([1.0, 0.0], [0, 0], counted_R=[False, False]).tolist() == [0.0, 0.0]


def test_unscored_rows_are_left_out() -> None:
    assert group_advantages([1.0, None, 0.0], [0, 0, 0]).tolist() == [0.5, 0.0, -0.5]
    assert group_advantages([1.0, None, 0.0], [0, 0, 0], baseline="leave_one_out").tolist() == [1.0, 0.0, -1.0]
    assert group_advantages([None, None], [0, 0]).tolist() == [0.0, 0.0]
    np.testing.assert_equal(total_rewards([[1.0, None], [None, None], [1.0, 2.0]], [2.0, 3.0]), [2.0, NAN, 8.0])
    assert summed_advantages([[None], [None]], [1.0], [0, 0]).tolist() == [0.0, 0.0]
