"""Every preference loss against numbers that the originals computed (tests/reference/preference.json).

What stands here only renames and reshapes: a log-probability of a whole response becomes a response of one token, the
reference's goes onto the first token, and an NLL that is given becomes a token of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lemma.models.logprobs import token_logprobs
from lemma.objectives import Loss, LossInputs, Objective, Totals
from lemma.objectives.preference import (
    ContrastivePreference,
    DirectPreference,
    KahnemanTversky,
    OddsRatio,
    reference_point,
    sequence_logprobs,
)

Case = dict[str, Any]
Results = dict[str, Any]
CASES: list[Case] = json.loads((Path(__file__).resolve().parents[1] / "reference" / "preference.json").read_text())[
    "cases"
]
DIVERGENCES = {"js_divergence": "js", "alpha_divergence": "alpha"}
NAMES = {"aot_pair": "aot_unpaired", "sppo_hard": "sppo"}


def tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(_numbers(value), dtype=dtype)


def _numbers(value: Any) -> Any:
    return [_numbers(one) for one in value] if isinstance(value, list) else float(value)


def loss_name(name: str) -> str:
    return NAMES.get(name, name.removesuffix("_pair"))


def rows_as_terms(rows: torch.Tensor, mask: torch.Tensor, sign: torch.Tensor, **tokens: torch.Tensor) -> LossInputs:
    """Padded rows, the two of a pair half of all rows apart, as flat tokens."""
    kept = mask.bool()
    number = torch.arange(len(rows))
    unit = number % (len(rows) // 2) if (sign < 0).any() and (sign > 0).sum() == (sign < 0).sum() else number
    return LossInputs(
        outputs={"logprobs": rows[kept]},
        sequence_N=number[:, None].expand_as(mask)[kept],
        group_B=unit,
        totals=Totals(float(kept.sum()), float(len(rows)), float(len(set(unit.tolist())))),
        tokens={name: values[kept] for name, values in tokens.items()},
        fields={"sign": sign.to(rows.dtype)},
    )


def on_first_token(sums: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A number per row, at the first place that counts."""
    first = mask.cumsum(1) == mask
    return torch.where(first & mask.bool(), sums[:, None], torch.zeros((), dtype=sums.dtype))


def signs(chosen: int, rejected: int) -> torch.Tensor:
    return torch.cat([torch.ones(chosen), -torch.ones(rejected)])


def of_responses(inputs: dict[str, torch.Tensor], *, reference: bool = True) -> tuple[LossInputs, list[torch.Tensor]]:
    """Log-probabilities of whole responses as responses of one token each."""
    leaves = [inputs["chosen_logps"].requires_grad_(), inputs["rejected_logps"].requires_grad_()]
    rows = torch.cat(leaves)[:, None]
    tokens = {}
    if reference and "ref_chosen_logps" in inputs:
        tokens["reference"] = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])[:, None]
    mask = torch.ones_like(rows)
    if "chosen_nll" not in inputs:
        return rows_as_terms(rows, mask, signs(*map(len, leaves)), **tokens), leaves
    leaves.append(inputs["chosen_nll"].requires_grad_())
    prompt = torch.zeros_like(rows)
    prompt[0] = -leaves[2]
    is_nll = torch.zeros_like(rows)
    is_nll[0] = 1.0
    wide = rows_as_terms(
        torch.cat([prompt, rows], 1),
        torch.cat([is_nll, mask], 1),
        signs(*map(len, leaves[:2])),
        nll=torch.cat([is_nll, 0 * mask], 1),
        response=torch.cat([0 * mask, mask], 1),
    )
    return wide, leaves


def metric(loss: Loss, name: str) -> torch.Tensor:
    value, count = loss.metrics[name]
    return torch.as_tensor(value) / torch.as_tensor(count)


def gradients(loss: Loss, leaves: list[torch.Tensor], names: list[str]) -> Results:
    found = torch.autograd.grad(loss.value, leaves, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=False))


def pair_results(
    objective: Objective, terms: LossInputs, leaves: list[torch.Tensor], per_pair: torch.Tensor | None
) -> Results:
    loss = objective(terms)
    results = {"loss": loss.value, **gradients(loss, leaves, ["grad_chosen", "grad_rejected", "grad_nll"])}
    results["reward_accuracy"] = metric(loss, "rewards/accuracies")
    results["reward_margin"] = metric(loss, "rewards/margins")
    results["chosen_rewards_mean"] = metric(loss, "rewards/chosen")
    results["rejected_rewards_mean"] = metric(loss, "rewards/rejected")
    if per_pair is not None:
        results["losses"] = per_pair
    if "rewards/mean" in loss.metrics:
        results["running_mean"] = metric(loss, "rewards/mean")
    return results


def direct(parameters: Case, losses: dict[str, float], **more: Any) -> DirectPreference:
    divergence = parameters.get("f_divergence_type", "reverse_kl")
    return DirectPreference(
        losses=losses,
        beta=parameters["beta"],
        label_smoothing=parameters["label_smoothing"],
        divergence=DIVERGENCES.get(divergence, divergence),
        tau=parameters.get("discopop_tau", 0.05),
        **more,
    )


def of_dpo(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    """The older definition: its coefficient of the alpha divergence counts from the other end."""
    parameters = case["params"]
    objective = direct(
        parameters,
        {"sigmoid" if parameters["loss_type"] == "dpo" else loss_name(parameters["loss_type"]): 1.0},
        divergence_alpha=1 - (parameters.get("alpha_divergence_coef") or 0.0),
        running=(0, 0.0),
    )
    terms, leaves = of_responses(inputs, reference=not parameters["reference_free"])
    return pair_results(objective, terms, leaves, objective.per_pair(terms))


def of_dpo_new(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    parameters = case["params"]
    leaves = [inputs["chosen_token_logps"].requires_grad_(), inputs["rejected_token_logps"].requires_grad_()]
    mask = torch.cat([inputs["chosen_mask"], inputs["rejected_mask"]])
    tokens = {"reference": on_first_token(torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]]), mask)}
    if parameters["use_weighting"]:
        tokens["collision"] = torch.cat([inputs["chosen_log_sum_sq_probs"], inputs["rejected_log_sum_sq_probs"]])
    weights = parameters["loss_weights"] or [1.0] * len(parameters["loss_types"])
    weight_of = dict(zip(parameters["loss_types"], weights, strict=True))
    nll = weight_of.pop("sft", 0.0)
    if nll:
        liked = torch.cat([inputs["chosen_mask"], 0 * inputs["rejected_mask"]])
        tokens["nll"] = liked / liked.sum()
    objective = direct(
        parameters,
        {loss_name(name): weight for name, weight in weight_of.items()},
        divergence_alpha=parameters["alpha_divergence_coef"],
        length_alpha=parameters["ld_alpha"],
        weighting=parameters["use_weighting"],
        nll=nll,
    )
    terms = rows_as_terms(torch.cat(leaves), mask, signs(*map(len, leaves)), **tokens)
    loss = objective(terms)
    return {
        "loss": loss.value,
        **gradients(loss, leaves, ["grad_chosen_tokens", "grad_rejected_tokens"]),
        "losses": objective.per_pair(terms),
        "metrics": {name: metric(loss, name) for name in case["outputs"]["metrics"]},
    }


def tversky(parameters: Case, baseline: torch.Tensor) -> KahnemanTversky:
    return KahnemanTversky(
        loss=parameters["loss_type"],
        beta=parameters["beta"],
        wanted_weight=parameters["desirable_weight"],
        unwanted_weight=parameters["undesirable_weight"],
        baseline=baseline.item(),
    )


def of_kto(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    objective = tversky(case["params"], reference_point(inputs["kl_logps"], inputs["ref_kl_logps"]))
    terms, leaves = of_responses(inputs)
    loss = objective(terms)
    return {
        "loss": loss.value,
        "losses": objective.per_response(terms),
        "kl": metric(loss, "reference_point"),
        **gradients(loss, leaves, ["grad_chosen", "grad_rejected"]),
    }


def of_kto_new(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    objective = tversky(case["params"], reference_point(inputs["kl_logps"], inputs["ref_kl_logps"]))
    rows, mask = inputs["token_logps"].requires_grad_(), inputs["completion_mask"]
    sign = torch.where(inputs["label"] > 0, 1.0, -1.0)
    terms = rows_as_terms(rows, mask, sign, reference=on_first_token(inputs["ref_logps"], mask))
    loss = objective(terms)
    wanted = {name: metric(loss, name) for name in case["outputs"]["metrics"] if name != "rewards/margins"}
    return {
        "loss": loss.value,
        "kl": metric(loss, "reference_point"),
        "metrics": wanted,
        **gradients(loss, [rows], ["grad_token_logps"]),
    }


def of_cpo(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    parameters = case["params"]
    objective = ContrastivePreference(
        loss=parameters["loss_type"],
        beta=parameters["beta"],
        gamma=parameters["simpo_gamma"],
        label_smoothing=parameters["label_smoothing"],
        alpha=parameters.get("alpha", 0.0),
        nll=parameters.get("cpo_alpha", 0.0),
    )
    terms, leaves = of_responses(inputs)
    return pair_results(objective, terms, leaves, objective.per_pair(terms))


def of_simpo(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    """The margin is given as gamma / beta."""
    parameters = case["params"]
    beta = parameters["beta"]
    objective = ContrastivePreference("simpo", beta, parameters["gamma_beta_ratio"] * beta, 0.0)
    terms, leaves = of_responses(inputs)
    return pair_results(objective, terms, leaves, objective.per_pair(terms))


def of_orpo(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    terms, leaves = of_responses(inputs)
    loss = OddsRatio(case["params"]["beta"])(terms)
    return {
        "loss": loss.value,
        "mean_log_sigmoid": metric(loss, "log_sigmoid_odds"),
        "mean_log_odds": metric(loss, "log_odds"),
        **gradients(loss, leaves, ["grad_chosen", "grad_rejected"]),
    }


def of_logprobs(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    """Logits as hidden states of a head that is the identity."""
    labels = inputs["labels"][:, 1:].long()
    logits = inputs["logits"][:, :-1]
    words = logits.shape[-1]
    picked, _ = token_logprobs(
        logits.reshape(-1, words), torch.eye(words, dtype=logits.dtype), labels.clamp(min=0).flatten()
    )
    terms = rows_as_terms(picked.reshape(labels.shape), labels >= 0, torch.ones(len(labels)))
    return {"logps": sequence_logprobs(terms, average=case["params"]["average"])}


BY_VARIANT: dict[str, Callable[[Case, dict[str, torch.Tensor]], Results]] = {
    "dpo": of_dpo,
    "open_instruct:dpo": of_dpo,
    "dpo_new": of_dpo_new,
    "kto": of_kto,
    "kto_new": of_kto_new,
    "cpo": of_cpo,
    "cpo_new": of_cpo,
    "open_instruct:simpo": of_simpo,
    "orpo": of_orpo,
    "orpo_new": of_orpo,
    "sequence_logps": of_logprobs,
}
# The mean of these over pairs is a metric of ours.
MEANS = {"chosen_rewards": "chosen_rewards_mean", "rejected_rewards": "rejected_rewards_mean"}


def route(case: Case) -> Callable[[Case, dict[str, torch.Tensor]], Results]:
    variant = case["variant"]
    return BY_VARIANT[variant] if variant in BY_VARIANT else BY_VARIANT[variant.split(":")[0]]


def test_no_case_is_left_out() -> None:
    assert len(CASES) == 75
    assert {route(case) for case in CASES} == set(BY_VARIANT.values())


def compare(mine: Any, expected: Any, tolerance: float, is_metric: bool, name: str) -> None:
    theirs = tensor(expected, torch.float64)
    value = torch.as_tensor(mine).detach().double()
    finite = theirs.isfinite()
    assert value.isfinite().all(), f"{name} is not finite"
    absolute = 1e-7 if is_metric else max(1e-10, tolerance * 1e-2)
    torch.testing.assert_close(
        value[finite], theirs[finite], rtol=tolerance, atol=absolute, msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CASES])
def test_equals_the_original(case: Case) -> None:
    dtype = getattr(torch, case.get("dtype", "float64"))
    tolerance = case.get("tolerance", 1e-6)
    inputs = {name: tensor(value, dtype) for name, value in case["inputs"].items()}
    results = route(case)(case, inputs)
    needed = {name for name in case["outputs"] if name.startswith("grad") or name in ("loss", "losses", "logps", "kl")}
    assert needed <= results.keys()
    for name, expected in case["outputs"].items():
        if name == "metrics":
            for key, value in results["metrics"].items():
                compare(value, expected[key], tolerance, True, key)
        elif name in MEANS and case["params"].get("reference_free"):
            continue  # without a reference the reward is the log-probability itself
        elif name in MEANS and MEANS[name] in results:
            mean = tensor(expected, torch.float64).mean().item()
            compare(results[MEANS[name]], mean, tolerance, True, name)
        elif name in results:
            fraction = name in ("reward_accuracy", "reward_margin", "running_mean")
            compare(results[name], expected, tolerance, fraction, name)
