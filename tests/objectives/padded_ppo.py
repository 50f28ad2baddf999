"""PPO on padded rows as open-instruct and TRL lay them out, around the functions that training uses."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lemma.objectives.gae import Array, gae, kl_penalties, scores_by_end, token_targets
from lemma.objectives.policy_loss import KlKind


def gae_packed(
    rewards: Array, values: Array, dones: Array, response_mask: Array, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Array, Array]:
    """`gae` for rows that hold several sequences: each ends where `dones` is not 0, and prompts take no part.

    Both flags may be the numbers of the sequences: they count as 1.
    """
    goes_on = (1 - dones.clip(0, 1)) * response_mask.clip(0, 1)
    return gae(rewards, values, gamma=gamma, lam=lam, goes_on=goes_on)


def until_stop(ids: Array, stop: int) -> Array:
    """1 up to and including the first `stop` of each row, 0 after it."""
    seen = np.cumsum(ids == stop, axis=-1) - (ids == stop)
    return (seen == 0).astype(np.int64)


def truncate_after_stop(ids: Array, stop: int, pad: int) -> tuple[Array, Array]:
    """Rows with everything after the first `stop` replaced by `pad`, and the index of each row's last real token."""
    mask = until_stop(ids, stop)
    return np.where(mask == 1, ids, pad), mask.sum(-1) - 1


@dataclass(frozen=True)
class PpoTargets:
    """What `ppo_targets` finds, padded rows throughout. Values, advantages and returns are 0 outside their masks."""

    sequence_lengths: Array
    contains_stop: Array
    response_mask: Array
    value_mask: Array
    scores: Array
    kl: Array
    rewards: Array
    values: Array
    advantages: Array
    returns: Array
    rlhf_reward: Array

    def as_dict(self) -> dict[str, Array]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def ppo_targets(
    response_ids: Array,
    log_probs: Array,
    ref_log_probs: Array,
    values: Array,
    scores: Array,
    *,
    stop_token_id: int,
    kl_coef: float = 0.05,
    kl_estimator: KlKind = "k1",
    whiten_rewards: bool = False,
    gamma: float = 1.0,
    lam: float = 0.95,
    missing_stop_score: float | None = None,
    missing_eos_penalty: float | None = None,
    min_response_length: int = 0,
) -> PpoTargets:
    """From padded rows of sampled responses to PPO's targets, as open-instruct and TRL define them.

    A response ends at its first stop token, its score stands one place after that where there is room, and the value
    of that place counts. One without a stop token (or with one before `min_response_length`) gets
    `missing_stop_score` instead of its score, or loses `missing_eos_penalty`.
    """
    response = until_stop(response_ids, stop_token_id)
    last = response.sum(-1) - 1
    stopped = (response_ids == stop_token_id).any(-1) & (last >= min_response_length)
    scores = scores_by_end(scores, stopped, missing_score=missing_stop_score, missing_penalty=missing_eos_penalty)
    kl = kl_penalties(log_probs, ref_log_probs, kl_estimator) * response
    found = token_targets(
        scores,
        kl,
        values,
        response,
        score_on="after",
        kl_coef=kl_coef,
        whiten_rewards=whiten_rewards,
        whiten_advantages=True,
        gamma=gamma,
        lam=lam,
    )
    return PpoTargets(
        sequence_lengths=last,
        contains_stop=stopped.astype(np.int64),
        response_mask=response,
        value_mask=found.value_mask,
        scores=scores,
        kl=kl,
        rewards=found.rewards,
        values=found.values,
        advantages=found.advantages,
        returns=found.returns,
        rlhf_reward=scores - kl_coef * kl.sum(-1),
    )
