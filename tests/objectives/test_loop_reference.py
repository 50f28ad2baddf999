"""LOOP's advantages, clip, rollout losses and filter against the original (tests/reference/loop.json)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lemma.algorithms.loop import Loop
from lemma.algorithms.parts.flat_advantages import Baseline, group_advantages, is_large
from lemma.objectives import Totals
from lemma.objectives.policy_loss import Clip, LogprobGain, PolicyLoss, Surrogate
from tests.objectives.padded import Case, assert_equal, cases, flat, tensor

CASES = cases("loop")
KINDS = {"adv", "ppo", "rollouts", "filter"}
BASELINES: dict[str, Baseline] = {"leave_one_out": "leave_one_out", "leave_none_out": "mean"}


def of(kind: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["kind"] == kind]


@pytest.mark.parametrize("case", of("adv"))
def test_advantages(case: Case) -> None:
    returns = case["inputs"]["returns"]
    groups = [number for number, group in enumerate(returns) for _ in group]
    mine = group_advantages(
        [value for group in returns for value in group],
        groups,
        baseline=BASELINES[case["params"]["baseline"]],
        scale="group" if case["params"]["normalise"] else "none",
        epsilon=0.0,
        unbiased=False,
    )
    assert mine.tolist() == pytest.approx(case["outputs"]["advantages"], rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("case", of("ppo"))
def test_clip(case: Case) -> None:
    clip = Clip.symmetric_in_log(case["params"]["epsilon"])
    ratio = tensor(case["inputs"]["importance_weights"]).requires_grad_()
    advantage = torch.full_like(ratio, case["inputs"]["advantage"])
    losses = -clip.gain(ratio, ratio.log(), advantage)
    assert_equal(losses, case["outputs"]["token_losses"], case)
    (pulled,) = torch.autograd.grad(losses.sum(), ratio)
    assert_equal(pulled, case["outputs"]["grad_importance_weights"], case)
    sides = clip.clipped(ratio, advantage)
    share = (sides["low"] | sides["high"]).double().mean()
    assert_equal(share, case["outputs"]["clipped_fraction"], case, atol=1e-7)


@pytest.mark.parametrize("case", of("rollouts"))
def test_rollout_losses(case: Case) -> None:
    """`kl_lambda` is not ours: the original adds it to every advantage, which is no KL; so does this test."""
    p, inputs, outputs = case["params"], case["inputs"], case["outputs"]
    surrogate: Surrogate = Clip.symmetric_in_log(p["epsilon"]) if p["clip"] else LogprobGain()
    level = {"pg_per_token": "token", "pg_per_trajectory": "trajectory"}[p["loss_type"]]
    objective = PolicyLoss(surrogate, level=level, normalise="sequence")  # type: ignore[arg-type]
    logprobs = tensor(inputs["log_probs"]).requires_grad_()
    losses = []
    for row, clipped in enumerate(outputs["clipped_fraction"]):
        one = slice(row, row + 1)
        terms = flat(
            logprobs[one],
            tensor(inputs["output_mask"])[one],
            tokens={"old": tensor(inputs["old_log_probs"])[one]},
            rows={"advantage": tensor(inputs["advantages"])[one] + p["kl_lambda"]},
            totals=Totals(1.0, 1.0, 1.0),
        )
        loss = objective(terms)
        losses.append(loss.value)
        if clipped is not None:
            total, count = loss.metrics["clip/region"]
            assert float(total) / float(count) == pytest.approx(clipped, abs=1e-7)
    assert_equal(torch.stack(losses), outputs["rollout_losses"], case)
    assert_equal(torch.stack(losses).sum(), outputs["loss"], case)
    (pulled,) = torch.autograd.grad(torch.stack(losses).sum(), logprobs)
    assert_equal(pulled, outputs["grad_logprobs"], case)


@pytest.mark.parametrize("case", of("filter"))
def test_filter(case: Case) -> None:
    """The original keeps as many more, the largest that are left, as it takes to give every worker the same number."""
    p, outputs, advantages = case["params"], case["outputs"], np.array(case["inputs"]["advantages"])
    size = advantages if p["positive_only"] else np.abs(advantages)
    order = np.argsort(-size, kind="stable")
    large = is_large(advantages, p["threshold"], p["positive_only"])
    count = min(-(-int(large.sum()) // p["world_size"]) * p["world_size"], len(order))
    assert set(np.flatnonzero(large)) == set(order[: large.sum()])
    assert order[:count].tolist() == outputs["kept_indices_sorted_by_abs_advantage"]
    assert 1 - count / len(advantages) == pytest.approx(outputs["filtered_fraction"])
    largest_dropped = float(size[order[count]]) if count < len(order) else None
    assert largest_dropped == pytest.approx(outputs["largest_dropped_abs_advantage"])
    assert [len(part) for part in np.array_split(order[:count], p["world_size"])] == outputs["per_worker"]


@pytest.mark.parametrize("case", of("filter"))
def test_the_algorithm_leaves_out_the_same_advantages(case: Case) -> None:
    """Rewards in pairs of opposite sign have a mean of 0, and so are their own advantages."""
    p, given = case["params"], np.array(case["inputs"]["advantages"])
    loop = Loop(least_advantage=p["threshold"], positive_only=p["positive_only"], leave_out_own=False)
    (mine,) = loop.advantages([np.concatenate([given, -given])])
    kept = np.concatenate([is_large(part, p["threshold"], p["positive_only"]) for part in (given, -given)])
    np.testing.assert_allclose(mine, np.where(kept, np.concatenate([given, -given]), 0.0), atol=1e-12)


def test_every_case_is_covered() -> None:
    assert len(CASES) == 18
    assert {case["kind"] for case in CASES} == KINDS
    assert not any(case.get("original_bug") for case in CASES)
