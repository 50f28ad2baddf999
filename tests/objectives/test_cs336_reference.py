"""The course's functions against its published snapshots and a public solution (tests/reference/cs336.json).

Entropy, masked sums and the supervised step are in test_reference.py, which reads the same file.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lemma.algorithms.compat import (
    compute_group_normalized_rewards,
    group_normalized_rewards,
    grpo_clip_loss,
    grpo_microbatch_train_step,
    grpo_no_clip_loss,
    naive_policy_gradient_loss,
    policy_gradient_loss,
)
from lemma.core.errors import UserError
from lemma.formats.encode import tokenize_prompt_and_output
from tests.objectives.padded import Case, assert_equal, cases, tensor
from tests.objectives.test_reference import BY_VARIANT as OTHERS

CASES = cases("cs336")
Results = dict[str, torch.Tensor]


def of_group_rewards(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    p, rewards = case["params"], inputs["rewards"]
    advantages = group_normalized_rewards(rewards, **p)
    if "rollout_responses" not in case["inputs"]:
        return {"advantages": advantages, "raw_rewards": rewards}
    responses = case["inputs"]["rollout_responses"]
    table = dict(zip(responses, case["inputs"]["rewards"], strict=True))
    found, raw, _ = compute_group_normalized_rewards(
        lambda response, truth: {"reward": table[response], "format_reward": 0.0},
        responses,
        ["42"] * len(responses),
        **p,
    )
    assert torch.equal(found, advantages)
    return {"advantages": found, "raw_rewards": raw}


def of_naive(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    return {"token_losses": naive_policy_gradient_loss(inputs["rewards_or_advantages"], inputs["log_probs"])}


def of_clip(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    losses, _ = grpo_clip_loss(inputs["advantages"], inputs["log_probs"], inputs["old_log_probs"], **case["params"])
    return {"token_losses": losses}


def named(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: inputs[name] for name in ("raw_rewards", "advantages", "old_log_probs")}


def of_dispatch(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    return {"token_losses": policy_gradient_loss(inputs["log_probs"], **case["params"], **named(inputs))[0]}


def of_micro_step(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    p = dict(case["params"])
    repeats = p.pop("repeats")
    constant = 1.0 if p.pop("reduction", None) == "masked_normalize" else None
    logprobs = inputs["log_probs"].requires_grad_()
    losses = [
        grpo_microbatch_train_step(
            logprobs, inputs["response_mask"], **p, **named(inputs), normalize_constant=constant
        )[0]
        for _ in range(repeats)
    ]
    assert logprobs.grad is not None
    return {"losses": torch.stack(losses), "grad_logprobs": logprobs.grad}


class Table:
    """A tokenizer given as a table."""

    def __init__(self, ids: dict[str, list[int]], pad_token_id: int):
        self.ids, self.pad_token_id = ids, pad_token_id

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return self.ids[text]


def of_tokenize(case: Case, inputs: dict[str, torch.Tensor]) -> Results:
    given = case["inputs"]
    table = Table(given["token_ids_of_each_string"], case["params"]["pad_token_id"])
    return tokenize_prompt_and_output(given["prompts"], given["outputs"], table)


BY_VARIANT: dict[str, Callable[[Case, dict[str, torch.Tensor]], Results]] = {
    "group_rewards": of_group_rewards,
    "naive_pg": of_naive,
    "grpo_clip": of_clip,
    "dispatch": of_dispatch,
    "micro_step": of_micro_step,
    "tokenize": of_tokenize,
}


def kind(case: Case) -> str:
    return str(case["variant"]).split(":")[0]


@pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in CASES if kind(c) in BY_VARIANT])
def test_equals_the_original(case: Case) -> None:
    dtype = torch.float32 if case["dtype"] == "float32" else torch.float64
    inputs = {
        name: tensor(value, dtype)
        for name, value in case["inputs"].items()
        if isinstance(value, list) and kind(case) != "tokenize" and name != "rollout_responses"
    }
    results = BY_VARIANT[kind(case)](case, inputs)
    assert results.keys() == case["outputs"].keys()
    for name, value in results.items():
        assert_equal(value.to(dtype), case["outputs"][name], case)


def test_every_case_is_covered() -> None:
    assert len(CASES) == 36
    for case in CASES:
        assert not case.get("original_bug")
        assert (kind(case) in BY_VARIANT) != (kind(case) in OTHERS), case["id"]


def test_without_clip_the_loss_is_the_ratio_times_the_advantage() -> None:
    logprobs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
    losses, found = grpo_no_clip_loss(torch.tensor([[2.0]]), logprobs, old)
    assert losses.tolist() == [pytest.approx([-2 * 1.6487212, -2.0])]
    assert found["ratio"].tolist() == [pytest.approx([1.6487212, 1.0])]
    same, _ = policy_gradient_loss(logprobs, "grpo_no_clip", advantages=torch.tensor([[2.0]]), old_log_probs=old)
    assert torch.equal(same, losses)


def test_a_missing_input_is_named() -> None:
    with pytest.raises(UserError, match="'grpo_clip' needs old_log_probs"):
        policy_gradient_loss(torch.zeros(1, 2), "grpo_clip", advantages=torch.ones(1, 1), cliprange=0.2)
    with pytest.raises(UserError, match="unknown loss type 'ppo'"):
        policy_gradient_loss(torch.zeros(1, 2), "ppo", advantages=torch.ones(1, 1), old_log_probs=torch.zeros(1, 2))  # type: ignore[arg-type]
