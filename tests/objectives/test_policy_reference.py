"""The policy loss against losses, gradients and metrics of TRL and open-instruct (tests/reference/grpo_family.json).

What stands here renames options and reshapes tensors; every formula is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.each_reward import summed_advantages, total_rewards
from lemma.algorithms.parts.flat_advantages import group_advantages
from lemma.algorithms.rloo import Rloo
from lemma.core.types import Group, Message, Problem, Trajectory
from lemma.objectives import Loss, LossInputs, Totals
from lemma.objectives.objective import Normalise
from lemma.objectives.policy_loss import (
    CappedWeight,
    Clip,
    GammaWeight,
    KlKind,
    KlTerm,
    Level,
    MismatchWeight,
    PolicyLoss,
    SoftGate,
    Surrogate,
)
from tests.objectives.padded import Case, assert_equal, cases, flat, tensor

CASES = cases("grpo_family")
FRACTION = 1e-7
"""Some originals compute fractions and metrics in float32."""


def of(*kinds: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["kind"] in kinds]


# --- losses ----------------------------------------------------------------------------------------------------------

NORMALISE: dict[str, Normalise] = {
    "grpo": "sequence",
    "sapo": "sequence",
    "bnpo": "token",
    "dapo": "token",
    "cispo": "token",
    "vespo": "token",
    "dr_grpo": "constant",
    "luspo": "constant",
}


def objective_of(case: Case) -> PolicyLoss:
    """The options of TRL in our words."""
    p = case["params"]
    kind: str = p["loss_type"]
    surrogate: Surrogate = Clip.around(p["epsilon"], p["epsilon_high"], p["delta"])
    level: Level = p["importance_sampling_level"]
    if kind == "cispo":
        surrogate = CappedWeight(p["epsilon_high"])
    elif kind == "sapo":
        surrogate = SoftGate(p["sapo_temperature_pos"], p["sapo_temperature_neg"])
    elif kind == "vespo":
        surrogate, level = GammaWeight(), "trajectory"
    older = p["impl"] == "trl018"
    kl = KlTerm(p["beta"], "k3", by_ratio=p["use_bias_correction_kl"] and not older) if p["beta"] else None
    return PolicyLoss(
        surrogate,
        level=level,
        normalise=NORMALISE[kind],
        constant=1.0 if kind == "luspo" else p["max_completion_length"],
        kl=kl,
        entropy=p["entropy_coef"],
        mismatch=MismatchWeight(cap=math.inf) if "importance_sampling_ratio" in case["inputs"] else None,
        top_entropy=p["top_entropy_quantile"],
        off_policy_limit=p["off_policy_mask_threshold"],
    )


def terms_of(case: Case, logprobs: torch.Tensor, entropy: torch.Tensor, rows: slice, totals: Totals) -> LossInputs:
    inputs = case["inputs"]
    old = None if inputs["old_log_probs"] is None else tensor(inputs["old_log_probs"])
    tokens = {"old": old, "reference": inputs.get("ref_log_probs")}
    if "importance_sampling_ratio" in inputs:
        assert old is not None
        tokens["sampler_logprobs"] = old - tensor(inputs["importance_sampling_ratio"]).log()
    given = {
        name: (value if isinstance(value, torch.Tensor) else tensor(value))[rows]
        for name, value in tokens.items()
        if value is not None
    }
    mask = tensor(inputs["completion_mask"])[rows]
    advantages = {"advantage": tensor(inputs["advantages"])[rows]}
    return flat(logprobs[rows], mask, tokens=given, rows=advantages, entropy_BT=entropy[rows], totals=totals)


def micro_batches(case: Case) -> list[tuple[slice, Totals]]:
    """The rows of each micro-batch and the counts that TRL divides by there.

    These counts are TRL's, not ours: Lemma's learner divides by those of the whole step, however it is packed.
    """
    p, mask = case["params"], tensor(case["inputs"]["completion_mask"])
    sizes = p["micro_batches"]
    steps = p["steps_per_generation"] or len(sizes)
    found, start = [], 0
    for size in sizes:
        rows = slice(start, start + size)
        start += size
        tokens = max(float(mask[rows].sum()), 1.0) * len(sizes)
        if p["loss_type"] in ("dapo", "cispo", "vespo"):
            items = p["num_items_in_batch"] or float(mask.sum())
            tokens = max(items, 1.0) * len(sizes) / steps
        found.append((rows, Totals(tokens, float(size * len(sizes)), float(size))))
    assert start == len(mask)
    return found


def compare_metrics(case: Case, expected: dict[str, Any], loss: Loss, alone: list[Loss]) -> None:
    """`alone` are the same rows one by one, for the least and largest of a metric over rows."""
    names = {
        "kl": "kl",
        "entropy": "entropy",
        "cispo_clip_ratio": "clip/high",
        "vespo/phi_seq_mean": "weight/mean",
        "clip_ratio/low_mean": "clip/low",
        "clip_ratio/high_mean": "clip/high",
        "clip_ratio/region_mean": "clip/region",
    }
    older = case["params"]["impl"] == "trl018"
    for name, want in expected.items():
        if name in ("policy_loss", "entropy_coef"):
            continue
        if "clip" in name and case["inputs"]["old_log_probs"] is None:
            assert want == 0.0 and "clip/high" not in loss.metrics, "no old policy, no ratio to clip"
            continue
        if name in names:
            mine = value_of(loss, names[name])
        else:
            metric = {"clip_ratio/low_min": "clip/low", "clip_ratio/high_max": "clip/high"}[name]
            each = np.array([value_of(part, metric, empty=math.nan) for part in alone])
            each = np.array([value_of(loss, metric)]) if older else each[~np.isnan(each)]
            mine = math.nan if not len(each) else each.min() if name.endswith("min") else each.max()
        assert mine == pytest.approx(float(want), rel=1e-6, abs=FRACTION, nan_ok=True), name


def value_of(loss: Loss, name: str, empty: float = 0.0) -> float:
    total, count = loss.metrics[name]
    return float(total) / float(count) if count else empty


@pytest.mark.parametrize("case", of("loss"))
def test_loss_gradient_and_metrics(case: Case) -> None:
    objective, inputs, outputs = objective_of(case), case["inputs"], case["outputs"]
    logprobs = tensor(inputs["log_probs"]).requires_grad_()
    given = inputs.get("token_entropies")
    entropy = (torch.zeros_like(logprobs) if given is None else tensor(given)).detach().requires_grad_()
    losses = []
    for rows, totals in micro_batches(case):
        loss = objective(terms_of(case, logprobs, entropy, rows, totals))
        losses.append(loss)
        number = len(losses) - 1
        expected = outputs.get("metrics") or outputs["micro_batch_metrics"][number]
        singles = [slice(row, row + 1) for row in range(rows.start, rows.stop)]
        alone = [objective(terms_of(case, logprobs, entropy, row, totals)) for row in singles]
        compare_metrics(case, expected, loss, alone)
        if "policy_loss" in expected:
            without = replace(objective, entropy=0.0)(terms_of(case, logprobs, entropy, rows, totals))
            assert_equal(without.value, expected["policy_loss"], case)
    total = torch.stack([loss.value for loss in losses]).sum()
    assert_equal(total, outputs["loss"], case)
    if "micro_batch_losses" in outputs:
        assert_equal(torch.stack([loss.value for loss in losses]), outputs["micro_batch_losses"], case)
    pulls = torch.autograd.grad(total, [logprobs, entropy], materialize_grads=True)
    assert_equal(pulls[0], outputs["grad_logprobs"], case)
    if "grad_token_entropies" in outputs:
        assert_equal(pulls[1], outputs["grad_token_entropies"], case)


@pytest.mark.parametrize("case", of("rloo_loss"))
def test_rloo_loss(case: Case) -> None:
    clip = Clip.around(case["params"]["epsilon"], case["params"]["epsilon_high"])
    objective = PolicyLoss(clip, level="trajectory", normalise="sequence")
    logprobs = tensor(case["inputs"]["log_probs"]).requires_grad_()
    shown = {**case, "params": {"impl": "trl116"}}
    rows = len(case["inputs"]["advantages"])
    entropy = torch.zeros_like(logprobs)
    loss = objective(terms_of(case, logprobs, entropy, slice(None), Totals(1.0, rows, rows)))
    alone = [
        objective(terms_of(case, logprobs, entropy, slice(row, row + 1), Totals(1.0, rows, rows)))
        for row in range(rows)
    ]
    assert_equal(loss.value, case["outputs"]["loss"], case)
    assert_equal(torch.autograd.grad(loss.value, logprobs)[0], case["outputs"]["grad_logprobs"], case)
    compare_metrics(shown, case["outputs"]["metrics"], loss, alone)


ESTIMATORS: list[KlKind] = ["k1", "k2", "k3", "weighted"]


@pytest.mark.parametrize("case", of("oi"))
def test_token_losses_of_open_instruct(case: Case) -> None:
    p, inputs, outputs = case["params"], case["inputs"], case["outputs"]
    surrogate: Surrogate = Clip.around(p["clip_lower"], p["clip_higher"])
    if p["loss_type"] == "cispo":
        surrogate = CappedWeight(1.0 + p["clip_higher"])
    kl = KlTerm(p["beta"], ESTIMATORS[p["kl_estimator"]], limit=40.0)
    weighted = "rho_weights" in inputs
    objective = PolicyLoss(
        surrogate, normalise="constant", kl=kl, mismatch=MismatchWeight(cap=math.inf) if weighted else None
    )
    logprobs, old = tensor(inputs["log_probs"]).requires_grad_(), tensor(inputs["old_log_probs"])
    tokens = {"old": old, "reference": tensor(inputs["ref_log_probs"])}
    if weighted:
        tokens["sampler_logprobs"] = old - tensor(inputs["rho_weights"]).log()
    mask, advantages = tensor(inputs["completion_mask"]), {"advantage": tensor(inputs["advantages"])}
    terms = flat(logprobs, mask, tokens=tokens, rows=advantages, totals=Totals(1.0, 1.0, 1.0))
    kept = mask.bool()
    (pulled,) = torch.autograd.grad(objective(terms).value, logprobs)
    assert_equal(pulled, outputs["grad_logprobs"], case)
    whole = replace(objective, kl=None)
    for row, column in kept.nonzero().tolist():
        one = torch.zeros_like(mask)
        one[row, column] = 1
        alone = flat(logprobs, one, tokens=tokens, rows=advantages, totals=Totals(1.0, 1.0, 1.0))
        loss = objective(alone)
        assert_equal(whole(alone).value, outputs["token_policy_loss"][row][column], case)
        assert value_of(loss, "kl") == pytest.approx(outputs["token_kl"][row][column], rel=1e-6, abs=1e-10)
        assert value_of(loss, "clip/region") == outputs["token_clipped"][row][column]


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in of("adv") if c.values[0]["variant"].startswith("advantages")])
def test_advantages(case: Case) -> None:
    p, rewards = case["params"], case["inputs"]["rewards"]
    groups = np.arange(len(rewards)) // p["group_size"]
    totals = total_rewards(rewards, p["reward_weights"])
    if p["multi_objective_aggregation"] == "normalize_then_sum":
        mine = summed_advantages(rewards, p["reward_weights"], groups, epsilon=1e-4)
    else:
        mine = group_advantages(totals, groups, scale=p["scale_rewards"], epsilon=1e-4)
    assert mine.tolist() == pytest.approx(case["outputs"]["advantages"], rel=1e-6, abs=1e-10)
    assert np.nanmean(totals) == pytest.approx(case["outputs"]["metrics"]["reward"])
    assert np.nanstd(totals, ddof=1) == pytest.approx(case["outputs"]["metrics"]["reward_std"])


@pytest.mark.parametrize("case", [c for c in of("adv") if c.values[0]["variant"].startswith("mismatch_ratio")])
def test_mismatch_ratios(case: Case) -> None:
    p, outputs = case["params"], case["outputs"]
    level, mode = p["mode"].split("_")
    old, mask = tensor(case["inputs"]["old_log_probs"]), tensor(case["inputs"]["completion_mask"])
    tokens = {"old": old, "sampler_logprobs": tensor(case["inputs"]["sampling_log_probs"])}
    terms = flat(old, mask, tokens=tokens, rows={"advantage": torch.ones(len(mask)).double()})
    weight = MismatchWeight(level, p["clip_max"], p["clip_min"], mask=mode == "mask")
    mine = weight(terms, terms.tokens["old"])
    expected = tensor(outputs["importance_sampling_ratio"]).expand_as(mask)[mask.bool()]
    assert_equal(mine, expected, case)
    loss = PolicyLoss(mismatch=weight)(terms)
    prefix = "sampling/sampling_logp_difference"
    assert value_of(loss, "mismatch/mean") == pytest.approx(outputs["metrics"][f"{prefix}/mean"], rel=1e-6)
    assert float(loss.maxima["mismatch/max"]) == pytest.approx(outputs["metrics"][f"{prefix}/max"], rel=1e-6)
    firsts = [int((terms.sequence_N == row).nonzero()[0]) for row in terms.sequence_N.unique().tolist()]
    each = mine if level == "token" else mine[firsts]
    for name in ("min", "mean", "max"):
        want = outputs["metrics"][f"sampling/importance_sampling_ratio/{name}"]
        assert float(getattr(each, name)()) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("case", of("rloo_adv"))
def test_rloo_advantages(case: Case) -> None:
    """The KL of a whole sequence lowers its reward; by the algorithm that trains."""
    p, inputs = case["params"], case["inputs"]
    old, reference = np.array(inputs["old_log_probs"]), np.array(inputs["ref_log_probs"])
    mask, rewards = np.array(inputs["completion_mask"]) > 0, total_rewards(inputs["rewards"], p["reward_weights"])
    samples = [
        Trajectory(
            ids_T=np.arange(1 + mask.shape[1]),
            loss_mask_T=np.append(False, mask[row]),
            rewards={"total": float(reward)},
            token_fields={"old": np.append(0.0, old[row]), "reference": np.append(0.0, reference[row])},
        )
        for row, reward in enumerate(rewards)
    ]
    size, problem = p["group_size"], Problem((Message("user", "?"),))
    groups = [Group(problem, samples[first : first + size]) for first in range(0, len(samples), size)]
    rloo = Rloo(
        group_size=size,
        reward_kl=p["beta"],
        reward_clip=p["reward_clip_range"],
        standardise=p["normalize_advantages"],
    )
    rloo.assign(groups, AlgorithmState())
    for sample, wanted in zip(samples, case["outputs"]["advantages"], strict=True):
        found = sample.token_fields["advantage"][sample.loss_mask_T]
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-10)
    terms = flat(tensor(inputs["old_log_probs"]), tensor(inputs["completion_mask"]))
    assert_equal(terms.per_sequence(terms.logprobs_N), case["outputs"]["old_sequence_log_probs"], case)


# --- nothing is left out ---------------------------------------------------------------------------------------------

COVERED: dict[str, Callable[..., None]] = {
    "loss": test_loss_gradient_and_metrics,
    "rloo_loss": test_rloo_loss,
    "oi": test_token_losses_of_open_instruct,
    "rloo_adv": test_rloo_advantages,
}


def test_every_case_is_covered() -> None:
    assert len(CASES) == 72
    for case in CASES:
        assert not case.get("original_bug")
        assert case["kind"] in COVERED or case["variant"].split(":")[0] in ("advantages", "mismatch_ratio"), case["id"]
