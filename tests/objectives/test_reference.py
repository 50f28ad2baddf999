"""The supervised step and the masked reductions against numbers that the originals computed (tests/reference).

What stands here only renames and reshapes; every formula is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lemma.algorithms.compat import (
    entropy,
    masked_mean,
    masked_mean_or_zero,
    masked_normalize,
    sft_microbatch_train_step,
)
from lemma.models.logprobs import token_logprobs
from lemma.objectives import LossInputs, NegativeLogLikelihood, Totals

FOLDER = Path(__file__).resolve().parents[1] / "reference"
Case = dict[str, Any]


def cases() -> list[Any]:
    found = []
    for name in ("cs336", "luffy_supervised", "ppo_masked_mean"):
        content = json.loads((FOLDER / f"{name}.json").read_text())
        for case in content["cases"]:
            if case["variant"].split(":")[0] not in BY_VARIANT:  # the policy's losses, in test_cs336_reference.py
                continue
            for key, value in case["inputs"].items():
                if isinstance(value, dict):
                    case["inputs"][key] = content["tensors"][value["$ref"].removeprefix("tensors/")]
            found.append(pytest.param(case, id=case["id"]))
    assert len(found) >= 20
    return found


def tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(_numbers(value), dtype=dtype)


def _numbers(value: Any) -> Any:
    return [_numbers(v) for v in value] if isinstance(value, list) else float(value)


def rows_as_terms(log_probs: torch.Tensor, mask: torch.Tensor) -> LossInputs:
    """Padded rows as flat tokens."""
    kept = mask.bool()
    rows = torch.arange(len(mask))[:, None].expand_as(mask)
    return LossInputs(
        outputs={"logprobs": log_probs[kept]},
        sequence_N=rows[kept],
        group_B=torch.arange(len(mask)),
        totals=Totals(float(kept.sum()), float(len(mask)), float(len(mask))),
    )


def of_entropy(case: Case, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    logits = inputs["logits"].requires_grad_()
    values = entropy(logits)
    results = {"entropy": values}
    if "masked_mean" in case["outputs"]:
        results["masked_mean"] = masked_mean(values, inputs["response_mask"])
        results["grad_logits"] = torch.autograd.grad(results["masked_mean"], logits)[0]
    return results


def of_reduction(case: Case, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    function = masked_normalize if case["variant"].startswith("masked_normalize") else masked_mean
    return {"result": function(inputs["tensor"], inputs["mask"], **case["params"])}


def of_mean_or_zero(case: Case, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parameters = case["params"]
    mean = masked_mean_or_zero(inputs["values"], inputs["mask"], parameters["axis"], parameters["denominator"])
    return {"mean": mean}


def of_sft_step(case: Case, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    log_probs = inputs["log_probs"].requires_grad_()
    parameters = dict(case["params"])
    repeats = parameters.pop("repeats")
    losses = [sft_microbatch_train_step(log_probs, inputs["response_mask"], **parameters)[0] for _ in range(repeats)]
    assert log_probs.grad is not None
    return {"losses": torch.stack(losses), "grad_logprobs": log_probs.grad}


def of_sft_loss(case: Case, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    log_probs = inputs["log_probs"].requires_grad_()
    loss = masked_mean(-log_probs, inputs["response_mask"])
    if loss.isnan():  # the gradient of 0/0 is nothing to compare
        return {"loss": loss}
    return {"loss": loss, "grad_logprobs": torch.autograd.grad(loss, log_probs)[0]}


BY_VARIANT: dict[str, Callable[[Case, dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "entropy": of_entropy,
    "masked_mean_zero_on_empty": of_mean_or_zero,
    "masked_mean": of_reduction,
    "masked_normalize": of_reduction,
    "sft_step": of_sft_step,
    "sft_loss": of_sft_loss,
}


def typed(case: Case) -> tuple[dict[str, torch.Tensor], torch.dtype, float]:
    dtype = torch.float32 if case.get("dtype") == "float32" else torch.float64
    return {key: tensor(value, dtype) for key, value in case["inputs"].items()}, dtype, case.get("tolerance", 1e-6)


@pytest.mark.parametrize("case", cases())
def test_equals_the_original(case: Case) -> None:
    inputs, dtype, tolerance = typed(case)
    results = BY_VARIANT[case["variant"].split(":")[0]](case, inputs)
    assert results
    for name, value in results.items():
        expected = tensor(case["outputs"][name], dtype)
        torch.testing.assert_close(value.detach(), expected, rtol=tolerance, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(
    "case", [c for c in cases() if c.values[0]["variant"].split(":")[0] in ("sft_step", "sft_loss")]
)
def test_the_objective_on_flat_tokens_equals_the_original(case: Case) -> None:
    """The same numbers from what the learner uses: `constant` is the course's loss, `token` is LUFFY's."""
    inputs, dtype, tolerance = typed(case)
    log_probs = inputs["log_probs"].requires_grad_()
    terms = rows_as_terms(log_probs, inputs["response_mask"])
    if case["variant"] == "sft_loss":
        expected, share = case["outputs"]["loss"], 1.0
        if not len(terms.logprobs_N):
            assert NegativeLogLikelihood("token")(terms).value.item() == 0.0, "no token, no loss"
            return
        loss = NegativeLogLikelihood("token")(terms).value
    else:
        expected = case["outputs"]["losses"][0]
        share = 1.0 / case["params"]["gradient_accumulation_steps"]
        loss = NegativeLogLikelihood("constant", case["params"]["normalize_constant"])(terms).value
    torch.testing.assert_close((loss * share).detach(), tensor(expected, dtype), rtol=tolerance, atol=1e-10)
    grad = torch.autograd.grad(loss * share * case["params"].get("repeats", 1), log_probs)[0]
    torch.testing.assert_close(grad, tensor(case["outputs"]["grad_logprobs"], dtype), rtol=tolerance, atol=1e-10)


@pytest.mark.parametrize("case", [c for c in cases() if c.values[0]["variant"] == "entropy"])
def test_the_learners_entropy_equals_the_original(case: Case) -> None:
    """Logits as hidden states of a head that is the identity."""
    inputs, dtype, tolerance = typed(case)
    words = inputs["logits"].shape[-1]
    rows = inputs["logits"].reshape(-1, words).requires_grad_()
    _, values = token_logprobs(
        rows, torch.eye(words, dtype=dtype), torch.zeros(len(rows), dtype=torch.long), entropy=True
    )
    assert values is not None
    expected = tensor(case["outputs"]["entropy"], dtype).flatten()
    torch.testing.assert_close(values.detach(), expected, rtol=tolerance, atol=1e-10)
    if "grad_logits" in case["outputs"]:
        grad = torch.autograd.grad(values.mean(), rows)[0]
        torch.testing.assert_close(
            grad, tensor(case["outputs"]["grad_logits"], dtype).reshape(-1, words), rtol=tolerance, atol=1e-10
        )
