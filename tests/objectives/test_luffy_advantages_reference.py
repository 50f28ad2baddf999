"""LUFFY's advantages and the other pieces of its trainer against the original's numbers (luffy_advantages.json).

What stands here only renames and reshapes; every formula is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lemma.algorithms import Algorithm, AlgorithmState
from lemma.algorithms.compat import entropy, masked_mean
from lemma.algorithms.parts.traces import mixed_advantages, weighted_by_origin, with_prefix_reward
from lemma.algorithms.reinforce import Reinforce
from lemma.core.types import Group, Message, Problem, Trajectory
from lemma.objectives import NegativeLogLikelihood
from lemma.objectives.controllers import AdaptiveKl
from lemma.objectives.gae import gae, kl_penalties, returns_to_go, rewards_with_kl, whiten
from lemma.objectives.mixed import Compat, MixedPolicyLoss
from lemma.objectives.policy_loss import Clip, Unclipped, kl_estimate
from lemma.objectives.value import ClippedValueLoss
from tests.objectives.padded_ppo import until_stop
from tests.objectives.rows import Case, assert_equal, cases, flat, measured, parameters, tensors

CASES = cases("luffy_advantages")
Found = dict[str, Any]


def arrays(case: Case) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors(case).items()}


def of_group(case: Case) -> Found:
    inputs, groups = arrays(case), case["inputs"]["group_ids"]
    advantages = mixed_advantages(
        inputs["token_rewards"].sum(-1),
        groups,
        inputs["prefix_mask"].any(-1) if "prefix_mask" in inputs else np.zeros(len(groups)),
        statistics="on_policy" if case["variant"].startswith("grpo_split") else "group",
        use_std=case["params"]["use_std"],
        epsilon=case["params"]["epsilon"],
        compat=True,
    )
    return {"advantages": advantages[:, None] * inputs["response_mask"]}


def of_reinforce(case: Case) -> Found:
    return {"advantages": assigned(Reinforce(), case)}


def of_reinforce_plus_plus(case: Case) -> Found:
    inputs = arrays(case)
    mask = inputs["response_mask"]
    returns = returns_to_go(inputs["token_rewards"], mask, case["params"]["gamma"])
    if np.count_nonzero(inputs["token_rewards"], axis=-1).max() > 1:  # no algorithm rewards single tokens
        return {"returns": returns, "advantages": whiten(returns, mask) * mask}
    return {"returns": returns, "advantages": assigned(Reinforce(whiten=True, gamma=case["params"]["gamma"]), case)}


def assigned(algorithm: Algorithm, case: Case) -> np.ndarray:
    """What the algorithm that trains gives to every token, for rewards at the end of responses."""
    inputs = arrays(case)
    mask = inputs["response_mask"] > 0
    samples = [
        Trajectory(
            ids_T=np.arange(1 + row.sum()),
            loss_mask_T=np.arange(1 + row.sum()) > 0,
            rewards={"total": float(rewards.sum())},
        )
        for row, rewards in zip(mask, inputs["token_rewards"], strict=True)
    ]
    algorithm.assign([Group(Problem((Message("user", "?"),)), samples)], AlgorithmState())
    found = np.zeros(mask.shape)
    found[mask] = np.concatenate([sample.token_fields["advantage"][1:] for sample in samples])
    return found


def of_gae(case: Case) -> Found:
    inputs = arrays(case)
    advantages, returns = gae(inputs["token_rewards"], inputs["values"], **case["params"])
    return {"advantages": whiten(advantages, inputs["response_mask"]), "returns": returns}


def of_whiten(case: Case) -> Found:
    inputs = arrays(case)
    return {"whitened": whiten(inputs["values"], inputs["mask"], **case["params"])}


def of_value_loss(case: Case) -> Found:
    inputs = tensors(case)
    values = inputs["values_new"].requires_grad_()
    fields = {"value": inputs["values_old"], "return": inputs["returns"]}
    loss = ClippedValueLoss(case["params"]["cliprange_value"])(
        flat(inputs["response_mask"], values, output="values", **fields)
    )
    grad = torch.autograd.grad(loss.value, values)[0]
    return {"loss": loss.value, "clip_fraction": measured(loss, "value_clipped"), "grad_values": grad}


def of_kl(case: Case) -> Found:
    inputs = tensors(case)
    log_probs = inputs["log_probs"].requires_grad_()
    kl = kl_estimate(case["params"]["kind"], log_probs, inputs["ref_log_probs"])
    loss = masked_mean(kl, inputs["response_mask"])
    return {"kl": kl, "loss": loss, "grad_logprobs": torch.autograd.grad(loss, log_probs)[0]}


def of_adaptive_kl(case: Case) -> Found:
    params, inputs = case["params"], case["inputs"]
    control = AdaptiveKl(params["init_kl_coef"], params["target_kl"], params["horizon"])
    found = []
    for observed, samples in zip(inputs["observed_kl"], inputs["n_steps"], strict=True):
        control.update(observed, samples)
        found.append(control.coefficient)
    return {"coefficients": torch.tensor(found, dtype=torch.float64)}


def of_sft_loss(case: Case) -> Found:
    inputs = tensors(case)
    log_probs = inputs["log_probs"].requires_grad_()
    terms = flat(inputs["response_mask"], log_probs)
    if not len(terms.logprobs_N):
        assert NegativeLogLikelihood("token")(terms).value.item() == 0.0, "no token, no loss; the original says 0/0"
        return {"loss": masked_mean(-log_probs, inputs["response_mask"])}
    loss = NegativeLogLikelihood("token")(terms).value
    return {"loss": loss, "grad_logprobs": torch.autograd.grad(loss, log_probs)[0]}


def of_policy_loss(case: Case) -> Found:
    inputs, params = tensors(case), case["params"]
    log_probs = inputs["log_probs"].requires_grad_()
    terms = flat(inputs["response_mask"], log_probs, advantage=inputs["advantages"], old=inputs["old_log_probs"])
    reduction: Any = "constant" if params["loss_remove_token_mean"] else "token"
    surrogate = Unclipped() if params["loss_remove_clip"] else Clip.around(0.2)
    loss = MixedPolicyLoss(surrogate, reduction, float(log_probs.shape[1]), compat=Compat())(terms)
    found = {
        "loss": loss.value,
        "grad_logprobs": torch.autograd.grad(loss.value, log_probs)[0],
        "ppo_kl": measured(loss, "ratio/kl"),
    }
    if "original_bug" not in case:  # there the fraction is 0 wherever tokens are clipped
        # Without a clip, the original counts what one of 0.2 would hold back.
        found["clip_fraction"] = measured(MixedPolicyLoss(Clip.around(0.2))(terms), "clip/region")
    return found


def of_entropy(case: Case) -> Found:
    inputs = tensors(case)
    logits = inputs["logits"].requires_grad_()
    values = entropy(logits)
    mean = masked_mean(values, inputs["response_mask"])
    return {"entropy": values, "masked_mean": mean, "grad_logits": torch.autograd.grad(mean, logits)[0]}


def of_kl_in_reward(case: Case) -> Found:
    inputs = arrays(case)
    kl = kl_penalties(inputs["old_log_probs"], inputs["ref_log_probs"], "k1")
    return {"rewards": rewards_with_kl(inputs["token_scores"], kl, case["params"]["kl_coef"])}


def of_eos_mask(case: Case) -> Found:
    return {"mask": until_stop(np.array(case["inputs"]["response_ids"]), case["params"]["eos_token_id"])}


ADAPTERS: dict[str, Callable[[Case], Found]] = {
    "grpo": of_group,
    "grpo_split": of_group,
    "reinforce": of_reinforce,
    "reinforce_plus_plus": of_reinforce_plus_plus,
    "gae": of_gae,
    "whiten": of_whiten,
    "value_loss": of_value_loss,
    "kl": of_kl,
    "adaptive_kl": of_adaptive_kl,
    "sft_loss": of_sft_loss,
    "policy_loss": of_policy_loss,
    "entropy": of_entropy,
    "kl_in_reward": of_kl_in_reward,
    "eos_mask": of_eos_mask,
}


def kind(case: Case) -> str:
    return case["id"].split("/")[1].split(":")[0]


ERRORS = [case for case in CASES if "error" in case["outputs"]]


def test_every_case_is_used() -> None:
    assert len(CASES) == 37
    assert {kind(case) for case in CASES} == set(ADAPTERS)
    assert [case["id"] for case in ERRORS] == ["luffy_advantages/grpo_split/no_on_policy_row/0"]


@pytest.mark.parametrize("case", parameters(case for case in CASES if case not in ERRORS))
def test_equals_the_original(case: Case) -> None:
    found = ADAPTERS[kind(case)](case)
    left_out = {"clip_fraction"} if "original_bug" in case else set()
    if case["outputs"].get("loss") == "NaN":  # nothing was learnt from, and so no gradient is there to compare
        left_out = {"grad_logprobs"}
    assert found.keys() | left_out == case["outputs"].keys()
    assert_equal(case, found, case["outputs"])


def test_a_group_of_teachers_rows_alone_has_no_advantage_where_the_original_fails() -> None:
    """It looks for the mean of the policy's rows, of which there are none, and raises KeyError."""
    (case,) = ERRORS
    assert case["inputs"]["group_ids"] == [0, 0, 1]
    assert not of_group(case)["advantages"][:2].any()


def test_statistics_by_hand() -> None:
    """Rewards 1 (teacher), 1, 0, 0: the mean of all is 1/2, that of the policy's own 1/3."""
    rewards, groups, off = [1, 1, 0, 0], [7, 7, 7, 7], [1, 0, 0, 0]
    assert mixed_advantages(rewards, groups, off).tolist() == [0.5, 0.5, -0.5, -0.5]
    own = mixed_advantages(rewards, groups, off, statistics="on_policy")
    np.testing.assert_allclose(own, [2 / 3, 2 / 3, -1 / 3, -1 / 3])
    scaled = mixed_advantages(rewards, groups, off, use_std=True, epsilon=0.0)
    np.testing.assert_allclose(scaled, np.array([0.5, 0.5, -0.5, -0.5]) / np.sqrt(1 / 3))


def test_tokens_weighted_by_their_origin() -> None:
    off = np.array([0.0, 1.0, 1.0, 0.0])
    assert weighted_by_origin(np.full(4, 0.5), off, off=2.0, on=3.0).tolist() == [1.5, 1.0, 1.0, 1.5]
    assert with_prefix_reward(np.full(4, 0.5), off, weight=4.0, group_size=8).tolist() == [0.5, 0.5, 0.5, 0.5]
    assert with_prefix_reward(np.full(4, -1.0), off, weight=4.0, group_size=8).tolist() == [-1.0, 0.5, 0.5, -1.0]
