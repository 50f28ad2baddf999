"""PPO's targets and losses against numbers that open-instruct and TRL computed (tests/reference/ppo.json).

What stands here only renames and reshapes; every formula is imported. Two numbers are the originals' alone:
`approx_kl` and `ratio_mean` are means over the rectangle, padding included; ours are means over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.compat import masked_mean_or_zero
from lemma.algorithms.parts.ppo_options import PpoCompat
from lemma.algorithms.ppo import Ppo
from lemma.core.types import Group, Message, Problem, Trajectory
from lemma.objectives.gae import (
    gae,
    kl_penalties,
    padded,
    returns_to_go,
    rewards_with_kl,
    token_targets,
    whiten,
)
from lemma.objectives.policy_loss import Clip, PolicyLoss, kl_estimate
from lemma.objectives.value import ClippedValueLoss
from tests.objectives.padded_ppo import gae_packed, ppo_targets, truncate_after_stop
from tests.objectives.rows import Case, assert_equal, cases, flat, measured, parameters, tensors

CASES = cases("ppo")
Found = dict[str, Any]


def arrays(case: Case) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors(case).items()}


def of_targets(case: Case) -> Found:
    inputs, params = arrays(case), dict(case["params"])
    params.pop("pad_token_id")
    is_replaced = params.pop("non_stop_penalty", False)
    params["missing_stop_score"] = params.pop("penalty_reward_value", None) if is_replaced else None
    params.pop("penalty_reward_value", None)
    targets = ppo_targets(**inputs, **params).as_dict()
    mask = targets["response_mask"]
    for kind in ("kl1", "kl2", "kl3"):
        targets[kind] = kl_penalties(inputs["log_probs"], inputs["ref_log_probs"], kind) * mask  # type: ignore[arg-type]
    return {name: value for name, value in targets.items() if name in case["outputs"]}


def of_losses(case: Case) -> Found:
    inputs, params = tensors(case), case["params"]
    log_probs, values = inputs["log_probs"].requires_grad_(), inputs["values_new"].requires_grad_()
    policy = PolicyLoss(Clip.around(params["cliprange"]))(
        flat(inputs["response_mask"], log_probs, advantage=inputs["advantages"], old=inputs["old_log_probs"])
    )
    fields = {"value": inputs["values_old"], "return": inputs["returns"]}
    value = ClippedValueLoss(params["cliprange_value"], params["vf_coef"])(
        flat(inputs["value_mask"], values, output="values", **fields)
    )
    total = policy.value + value.value
    grads = torch.autograd.grad(total, [log_probs, values])
    mask, places = inputs["response_mask"], inputs["response_mask"].numel()
    with torch.no_grad():  # not ours: over every place of the rectangle; on padding the two policies are the same
        squared = kl_estimate("k2", log_probs, inputs["old_log_probs"]) * mask
        ratio_sum = policy.metrics["ratio/mean"][0] + (1 - mask).sum()
    found = {
        "policy_loss": policy.value,
        "value_loss": measured(value, "value_loss"),
        "scaled_value_loss": value.value,
        "loss": total,
        "grad_logprobs": grads[0],
        "grad_values": grads[1],
        "policy_clip_fraction": measured(policy, "clip/region"),
        "value_clip_fraction": measured(value, "value_clipped"),
        "approx_kl": squared.sum() / places,
        "ratio_mean": ratio_sum / places,
    }
    return {name: value for name, value in found.items() if name in case["outputs"]}


def of_kl_estimators(case: Case) -> Found:
    inputs = tensors(case)
    d, ratio = inputs["log_ratio_to_ref"], inputs["ratio_to_old"]
    kinds: list[Any] = ["k1", "k2", "k3", "weighted"]
    return {"estimates": torch.stack([kl_estimate(kind, d, torch.zeros_like(d), ratio=ratio) for kind in kinds])}


def of_gae(case: Case) -> Found:
    function = gae_packed if kind(case) == "gae_packed" else gae
    advantages, returns = function(**arrays(case), **case["params"])
    return {"advantages": advantages, "returns": returns}


def of_mean(case: Case) -> Found:
    inputs, params = tensors(case), case["params"]
    return {"mean": masked_mean_or_zero(inputs["values"], inputs["mask"], params["axis"], params["denominator"])}


def of_whiten(case: Case) -> Found:
    inputs = arrays(case)
    return {"whitened": whiten(inputs["values"], inputs["mask"], **case["params"])}


def of_truncate(case: Case) -> Found:
    params = case["params"]
    ids, last = truncate_after_stop(
        np.array(case["inputs"]["response_ids"]), params["stop_token_id"], params["pad_token_id"]
    )
    return {"truncated_ids": ids, "last_token_index": last}


ADAPTERS: dict[str, Callable[[Case], Found]] = {
    "targets": of_targets,
    "targets_trl": of_targets,
    "losses": of_losses,
    "losses_trl": of_losses,
    "kl_estimators": of_kl_estimators,
    "gae": of_gae,
    "gae_packed": of_gae,
    "masked_mean_zero_on_empty": of_mean,
    "whiten": of_whiten,
    "truncate": of_truncate,
}


def kind(case: Case) -> str:
    return case["id"].split("/")[1].split(":")[0]


def test_every_case_is_used() -> None:
    assert len(CASES) == 25
    assert {kind(case) for case in CASES} == set(ADAPTERS)
    assert not any("original_bug" in case or "error" in case["outputs"] for case in CASES)


@pytest.mark.parametrize("case", parameters(CASES))
def test_equals_the_original(case: Case) -> None:
    found = ADAPTERS[kind(case)](case)
    assert found.keys() == case["outputs"].keys()
    assert_equal(case, found, case["outputs"])


# --- through the algorithm itself -----------------------------------------------------------------------------------

TARGETS = [case for case in CASES if kind(case).startswith("targets")]


def trained_ppo(case: Case, **options: Any) -> Ppo:
    params = case["params"]
    replaced = params["penalty_reward_value"] if params.get("non_stop_penalty") else None
    return Ppo(
        gamma=params["gamma"],
        lam=params["lam"],
        kl=params["kl_coef"],
        kl_estimator=params["kl_estimator"].replace("kl", "k"),
        compat=PpoCompat(
            whiten_rewards=params["whiten_rewards"],
            missing_eos_score=replaced,
            missing_eos_penalty=params.get("missing_eos_penalty"),
        ),
        **options,
    )


def sampled(case: Case, mask: np.ndarray) -> list[Trajectory]:
    """The rows as samples behind a prompt of one token. Where the mask goes on after the response, the two policies
    say the same, as they do in the originals."""
    inputs, outputs = arrays(case), case["outputs"]
    samples = []
    for row, inside in enumerate(mask.astype(bool)):
        answered = np.array(outputs["response_mask"][row], dtype=bool)[inside]
        fields = {
            "value": inputs["values"][row][inside],
            "old": np.where(answered, inputs["log_probs"][row][inside], 0.0),
            "reference": np.where(answered, inputs["ref_log_probs"][row][inside], 0.0),
        }
        ids = inputs["response_ids"][row][inside].astype(np.int64)
        samples.append(
            Trajectory(
                ids_T=np.concatenate([[1], ids]),
                loss_mask_T=np.arange(len(ids) + 1) > 0,
                rewards={"total": float(inputs["scores"][row])},
                finish="stop" if outputs["contains_stop"][row] else "length",
                token_fields={name: np.concatenate([[0.0], numbers]) for name, numbers in fields.items()},
            )
        )
    return samples


def assigned(ppo: Ppo, samples: list[Trajectory], width: int) -> Found:
    memory = AlgorithmState()
    ppo.assign([Group(Problem((Message("user", "?"),)), samples)], memory)
    rows = {name: np.zeros((len(samples), width)) for name in ("advantage", "return")}
    for row, sample in enumerate(samples):
        for name, table in rows.items():
            table[row, : sample.trained_tokens] = sample.token_fields[name][sample.loss_mask_T]
    return rows | {"kl_seen": memory.numbers["kl_seen"]}


@pytest.mark.parametrize("case", parameters(TARGETS))
def test_what_is_trained_equals_the_original(case: Case) -> None:
    """The place after a response, where the originals put the score, as a last token of it.

    Whitening of advantages leaves that place out there, so it is done here, on what the algorithm gave."""
    outputs = {name: np.array(value, dtype=np.float64) for name, value in case["outputs"].items()}
    response, valued = outputs["response_mask"], outputs["value_mask"]
    found = assigned(trained_ppo(case, whiten=False), sampled(case, valued), response.shape[1])
    expected = {name: case["outputs"][name] for name in ("advantages", "returns")}
    mine = {"returns": found["return"], "advantages": whiten(found["advantage"], response) * response}
    assert_equal(case, mine, expected)
    assert found["kl_seen"] == pytest.approx(outputs["kl"].sum(-1).mean(), rel=1e-6)


@pytest.mark.parametrize("case", parameters(TARGETS))
def test_a_row_without_room_is_trained_as_the_original_whitening_included(case: Case) -> None:
    """Rows that are cut at their end: there the score of the originals stands on the last token too."""
    mask = np.array(case["outputs"]["response_mask"])
    for row, sample in enumerate(sampled(case, mask)):
        length = sample.trained_tokens
        inputs = {
            name: [value[row]] if name == "scores" else [value[row][:length]] for name, value in case["inputs"].items()
        }
        expected = of_targets({**case, "inputs": inputs})
        found = assigned(trained_ppo(case), [sample], length)
        np.testing.assert_allclose(found["return"], expected["returns"], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found["advantage"], expected["advantages"], rtol=1e-12, atol=1e-12)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_gae_by_hand() -> None:
    """gamma = lambda = 1/2, rewards 0, 0, 1, values 1, 2, 3.

    Surprises: 0 + 1 - 1 = 0, 0 + 1.5 - 2 = -0.5, 1 - 3 = -2; each advantage adds a quarter of the next one.
    """
    advantages, returns = gae(np.array([0.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [-0.25, -1.0, -2.0]
    assert returns.tolist() == [0.75, 1.0, 1.0]


def test_flags_of_packed_rows_may_be_numbers_of_sequences() -> None:
    """Two sequences: the first ends with the second token, the third token is a prompt."""
    rewards, values = np.array([0.0, 1.0, 0.0, 0.0, 2.0]), np.array([0.5, 0.25, 3.0, 1.0, 1.5])
    dones, mask = np.array([0, 1, 0, 0, 2]), np.array([1, 1, 0, 2, 2])
    numbered = gae_packed(rewards, values, dones, mask, gamma=0.9, lam=0.8)
    flags = gae_packed(rewards, values, dones > 0, mask > 0, gamma=0.9, lam=0.8)
    assert np.array_equal(numbered, flags)
    alone = gae(rewards[:2], values[:2], gamma=0.9, lam=0.8)
    assert numbered[0][:2].tolist() == pytest.approx(alone[0].tolist())


def test_sequences_of_different_lengths_are_as_if_alone() -> None:
    rng = np.random.default_rng(0)
    settings: dict[str, Any] = {"kl_coef": 0.1, "gamma": 0.9, "lam": 0.8, "score_on": "last"}
    settings |= {"whiten_rewards": False, "whiten_advantages": False}
    values, kl = ([rng.normal(size=n) for n in (3, 1, 0, 5)] for _ in range(2))
    scores = rng.normal(size=4)
    rows, mask = padded(values)
    found = token_targets(scores, padded(kl)[0], rows, mask, **settings)
    for row, (value, penalty) in enumerate(zip(values, kl, strict=True)):
        n = len(value)
        assert not found.advantages[row, n:].any() and not found.returns[row, n:].any()
        if n:
            rewards = -0.1 * penalty
            rewards[-1] += scores[row]
            alone = gae(rewards, value, gamma=0.9, lam=0.8)
            np.testing.assert_allclose(found.advantages[row, :n], alone[0], rtol=1e-12)
            np.testing.assert_allclose(found.returns[row, :n], alone[1], rtol=1e-12)
    assert token_targets(np.zeros(0), *padded([])[:1] * 2, padded([])[1], **settings).advantages.size == 0


def test_returns_begin_again_where_the_mask_is_0() -> None:
    rewards, mask = np.array([1.0, 2.0, 0.0, 4.0]), np.array([1.0, 1.0, 0.0, 1.0])
    assert returns_to_go(rewards, mask, gamma=0.5).tolist() == [2.0, 2.0, 2.0, 4.0]


def test_whitening_of_one_value_and_of_none() -> None:
    assert whiten(np.array([5.0])).tolist() == [0.0]
    assert whiten(np.array([5.0, 1.0]), np.array([1, 0]), shift_mean=False).tolist() == pytest.approx([5.0, 1.0])
    assert whiten(np.zeros(0)).size == 0
    assert whiten(np.array([1.0, 3.0])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_a_missing_stop_loses_the_penalty() -> None:
    """The first row stops at once, the second never does."""
    ids = np.array([[2, 9, 9], [9, 9, 9]])
    zeros = np.zeros((2, 3))
    found = ppo_targets(ids, zeros, zeros, zeros, np.array([1.0, 1.0]), stop_token_id=2, missing_eos_penalty=0.25)
    assert found.scores.tolist() == [1.0, 0.75]
    assert found.rewards.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.75]]


def test_rewards_lose_the_kl() -> None:
    assert rewards_with_kl(np.array([0.0, 1.0]), np.array([0.5, -0.5]), 0.1).tolist() == [-0.05, 1.05]
