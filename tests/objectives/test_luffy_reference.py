"""LUFFY's loss against numbers that the original computed (tests/reference/luffy_policy_loss.json).

What stands here only renames and reshapes; every formula is imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lemma.core.errors import UserError
from lemma.objectives.controllers import LearnedEntropy
from lemma.objectives.mixed import Compat, MixedPolicyLoss
from lemma.objectives.policy_loss import Clip, KlTerm, Unclipped
from lemma.objectives.shaping import ShapeKind, Shaping
from tests.objectives.rows import Case, assert_equal, cases, flat, measured, parameters, tensor, tensors

CASES = cases("luffy_policy_loss")
STEPS = [case for case in CASES if case["variant"].startswith("actor_step")]
LOSSES = [case for case in CASES if case not in STEPS and "error" not in case["outputs"]]
ERRORS = [case for case in CASES if "error" in case["outputs"]]
METRICS = {
    "on_pg_loss": "on/loss",
    "on_pg_clipfrac": "clip/region",
    "on_policy_prob": "on/prob",
    "ppo_kl": "ratio/kl",
    "off_pg_loss": "off/loss",
    "off_policy_prob": "off/prob",
    "off_ratio_mean": "off/ratio",
    "off_ratio_max_clip_frac": "off/max_clipped",
    "off_ratio_min_clip_frac": "off/min_clipped",
}
"""`off_pg_clipfrac` is not among them: it is always 0, since tokens of a teacher are never clipped."""
ZERO_WHEN_EMPTY = {"off_pg_loss", "off_policy_prob", "off_ratio_mean", "on_pg_clipfrac", "on_policy_prob"}
"""Means over nothing that the original turns from not-a-number into 0."""
KNOWN_GAMMAS = {"on": ("0.1", "0.5"), "off": ("0.1", "0.3", "0.5")}


def test_every_case_is_used() -> None:
    assert len(CASES) == len(LOSSES) + len(STEPS) + 1 == 52
    assert {case["variant"] for case in ERRORS} == {"invalid_option", "actor_step:off_policy_with_kl"}


def shape_of(params: dict[str, Any], side: str) -> Shaping:
    kind, gamma = params[f"{side}_policy_reshape"], 0.1
    name, _, number = kind.rpartition("_")
    if name == "p_div_p" and number in KNOWN_GAMMAS[side]:
        kind, gamma = name, float(number)
    weight, power = params[f"{side}_policy_reshape_weight"], params[f"{side}_policy_reshape_pow_exp"]
    return Shaping(kind, weight, power, gamma)


def loss_of(case: Case, **changes: Any) -> MixedPolicyLoss:
    params = case["params"]
    high = max(params["clip_upper_bound"], 1 + params["clip_ratio"])
    settings: dict[str, Any] = {
        "normalise": "constant" if params["loss_remove_token_mean"] else "token",
        "constant": float(len(case["inputs"]["log_probs"][0])),
        "on_shape": shape_of(params, "on"),
        "off_shape": shape_of(params, "off"),
        "surrogate": Unclipped() if params["loss_remove_clip"] else Clip(1 - params["clip_ratio"], high),
        "off_max": params["off_policy_max_clip"],
        "off_min": params["off_policy_min_clip"],
        "skip_above": params["all_max_clip"],
        "compat": Compat(),
    }
    return MixedPolicyLoss(**(settings | changes))


FIELDS = {"advantages": "advantage", "old_log_probs": "old", "prefix_mask": "off", "target_probs": "target_prob",
          "ref_log_probs": "reference"}  # fmt: skip


def fields_of(inputs: dict[str, torch.Tensor], without: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    return {FIELDS[name]: value for name, value in inputs.items() if name in FIELDS and name not in without}


@pytest.mark.parametrize("case", parameters(LOSSES))
def test_loss_gradient_and_metrics_equal_the_original(case: Case) -> None:
    inputs = tensors(case)
    log_probs = inputs["log_probs"].requires_grad_()
    loss = loss_of(case)(flat(inputs["response_mask"], log_probs, **fields_of(inputs)))
    found: dict[str, Any] = {"loss": loss.value}
    if inputs["response_mask"].any():  # without a token there is nothing that a gradient could belong to
        found["grad_logprobs"] = torch.autograd.grad(loss.value, log_probs)[0]
    for name, mine in METRICS.items():
        value = measured(loss, mine) if mine in loss.metrics else torch.zeros(())
        found[name] = value.nan_to_num(0.0) if name in ZERO_WHEN_EMPTY else value
    assert_equal(case, found, case["outputs"])


@pytest.mark.parametrize("case", parameters(LOSSES))
def test_the_default_differs_from_the_original_by_an_explicit_count_only(case: Case) -> None:
    """A mean over all tokens is the original's, where no token is skipped; a constant counts once for each row."""
    inputs = tensors(case)
    log_probs = inputs["log_probs"].requires_grad_()
    loss = loss_of(case, compat=None)
    value = loss(flat(inputs["response_mask"], log_probs, **fields_of(inputs))).value
    scale = 1.0
    if loss.normalise == "constant":
        scale = float(len(log_probs))
    elif loss.skip_above is not None:
        scale = inputs["response_mask"].sum() / ((log_probs.exp() <= loss.skip_above) * inputs["response_mask"]).sum()
    if not inputs["response_mask"].any():
        assert value.item() == 0.0, "no token, no loss"
        return
    found = {"loss": value * scale, "grad_logprobs": torch.autograd.grad(value * scale, log_probs)[0]}
    assert_equal(case, found, case["outputs"])


def test_an_unknown_reshaping_is_refused() -> None:
    (case,) = [case for case in ERRORS if case["variant"] == "invalid_option"]
    with pytest.raises(UserError, match="p_div_p"):
        loss_of(case)


# --- whole steps -----------------------------------------------------------------------------------------------------


def step_loss(case: Case, **changes: Any) -> MixedPolicyLoss:
    params, rows = case["params"], len(case["inputs"]["log_probs"])
    adaptive = params["adaptive_entropy"]
    weight = params["entropy_coeff"]
    if adaptive and adaptive["kind"] == "learned":
        weight = learned(case).coefficient
    settings: dict[str, Any] = {
        "compat": Compat(rows // params["micro_batch_size"]),
        "sft": params["sft_loss_coef"] if params["branch"] == "sft_multitask" else None,
        "entropy": weight,
        "entropy_target": adaptive["target_entropy"] if adaptive and adaptive["kind"] == "fixed" else None,
        "kl": KlTerm(params["kl_loss_coef"], params["kl_loss_type"]) if params["kl_loss_coef"] else None,
        "ratio_kl": params["ppo_kl_loss_coef"] or 0.0,
    }
    return loss_of(case, **(settings | changes))


def learned(case: Case) -> LearnedEntropy:
    adaptive = case["params"]["adaptive_entropy"]
    return LearnedEntropy(case["params"]["entropy_coeff"], target=adaptive["target_entropy"], limit=adaptive["clip"])


def packs(case: Case) -> list[slice]:
    size = case["params"]["micro_batch_size"]
    return [slice(start, start + size) for start in range(0, len(case["inputs"]["log_probs"]), size)]


def run_step(case: Case, loss: MixedPolicyLoss, rows: list[slice]) -> tuple[dict[str, Any], list[Any]]:
    inputs = tensors(case)
    leaves = [inputs["log_probs"].requires_grad_(), inputs["token_entropies"].requires_grad_()]
    without = ("prefix_mask",) if case["params"]["branch"] == "plain" else ()
    fields = fields_of(inputs, without)
    losses = [loss(flat(inputs["response_mask"], leaves[0], entropies=leaves[1], rows=part, **fields)) for part in rows]
    total = torch.stack([part.value for part in losses]).sum()
    grads = torch.autograd.grad(total, leaves, materialize_grads=True)
    return {"grad_logprobs": grads[0], "grad_token_entropies": grads[1]}, losses


STEP_METRICS = {
    "actor/off_pg_loss": "off/loss",
    "actor/on_pg_loss": "on/loss",
    "actor/off_policy_prob": "off/prob",
    "actor/on_policy_prob": "on/prob",
    "actor/off_ratio_mean": "off/ratio",
    "actor/entropy_loss": "entropy",
    "actor/ppo_kl": "ratio/kl",
    "actor/pg_clipfrac": "clip/region",
    "actor/kl_loss": "kl",
}


@pytest.mark.parametrize("case", parameters(case for case in STEPS if case not in ERRORS))
def test_the_gradient_of_a_step_equals_the_original(case: Case) -> None:
    found, losses = run_step(case, step_loss(case), packs(case))
    assert_equal(case, found, case["outputs"])
    for name, mine in STEP_METRICS.items():
        if name not in case["outputs"]["metrics"]:
            continue
        if name == "actor/pg_clipfrac" and case["params"]["branch"] != "on_off_policy":
            continue  # taken after the clipped maximum: 0 where clips happen, a fraction where none do
        wanted = tensor(case["outputs"]["metrics"][name]).reshape(-1)
        values = torch.stack([measured(loss, mine) for loss in losses])
        torch.testing.assert_close(values, wanted, rtol=1e-6, atol=1e-7)
    if "grad_log_alpha" in case["outputs"]:
        entropy = measured(losses[0], "entropy").item()
        control, metrics = learned(case), case["outputs"]["metrics"]
        assert control.gradient(entropy) == pytest.approx(case["outputs"]["grad_log_alpha"], rel=1e-6)
        assert control.loss(entropy) == pytest.approx(metrics["actor/alpha_loss"], rel=1e-6)
        assert control.coefficient == pytest.approx(metrics["actor/entropy_coeff"], rel=1e-6)
        assert control.log_alpha == pytest.approx(metrics["actor/log_alpha"], rel=1e-6)


def test_a_kl_beside_teachers_tokens_works_where_the_original_fails() -> None:
    """There it raises KeyError. Here it is the mixed loss plus the mean KL: the two gradients add."""
    (case,) = [case for case in STEPS if case in ERRORS]
    both, losses = run_step(case, step_loss(case), packs(case))
    without, _ = run_step(case, step_loss(case, kl=None), packs(case))
    inputs = tensors(case)
    d = inputs["ref_log_probs"] - inputs["log_probs"]
    share = inputs["response_mask"] / inputs["response_mask"].sum()
    torch.testing.assert_close(both["grad_logprobs"] - without["grad_logprobs"], 0.01 * (1 - d.exp()) * share)
    torch.testing.assert_close(measured(losses[0], "kl"), ((d.exp() - d - 1) * share).sum())


@pytest.mark.parametrize("kind", ["no_reshape", "logp", "p_logp", "square_root", "pow", "p_div_p"])
def test_reshapings_by_hand(kind: ShapeKind) -> None:
    """p = 1/4, old p = 1/2."""
    p, old = torch.tensor(0.25).log(), torch.tensor(0.5).log()
    shape = Shaping(kind, weight=0.1, power=2.0, gamma=0.25)
    logs = {"ratio": -0.6931472, "p": -1.3862944}
    expected = {
        "no_reshape": (0.5, 0.25),
        "logp": (logs["ratio"], 0.1 * logs["p"]),
        "p_logp": (0.5 + 0.1 * logs["ratio"], 0.25 + 0.1 * logs["p"]),
        "square_root": (0.5**0.5, 0.5),
        "pow": (0.25, 0.0625),
        "p_div_p": (0.5 / (2 / 3), 0.5),
    }[kind]
    assert shape.of_ratio(p, old).item() == pytest.approx(expected[0], rel=1e-6)
    assert shape.of_probability(p).item() == pytest.approx(expected[1], rel=1e-6)
