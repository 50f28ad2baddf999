"""What PPO learns towards: rewards with a KL penalty, generalised advantage estimates, whitening.

Plain numpy: these numbers are constants of an update. Time is the last axis; a rectangle of padded rows and a single
sequence are treated alike. Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from lemma.objectives.kl import KlKind, kl_estimate

Array = np.ndarray


def gae(
    rewards: Array, values: Array, *, gamma: float = 1.0, lam: float = 0.95, goes_on: Array | None = None
) -> tuple[Array, Array]:
    """Generalised advantage estimates, and returns (advantage plus value), along the last axis.

    Nothing comes after the last token. `goes_on` is 0 where nothing comes after a token before the end either.
    """
    on = np.ones_like(values) if goes_on is None else goes_on
    advantages = np.zeros_like(values)
    later = np.zeros_like(values[..., 0])
    next_value = np.zeros_like(later)
    for t in reversed(range(values.shape[-1])):
        surprise = rewards[..., t] + gamma * next_value * on[..., t] - values[..., t]
        later = surprise + gamma * lam * on[..., t] * later
        advantages[..., t], next_value = later, values[..., t]
    return advantages, advantages + values


def gae_packed(
    rewards: Array, values: Array, dones: Array, response_mask: Array, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Array, Array]:
    """`gae` for rows that hold several sequences: each ends where `dones` is 1, and prompts take no part."""
    return gae(rewards, values, gamma=gamma, lam=lam, goes_on=(1 - dones) * response_mask)


def gae_of_sequences(
    rewards: Sequence[Array], values: Sequence[Array], *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[list[Array], list[Array]]:
    """`gae` for sequences of different lengths, side by side."""
    lengths = [len(part) for part in values]
    if not any(lengths):
        return [np.zeros(0) for _ in lengths], [np.zeros(0) for _ in lengths]
    width = max(lengths)
    table = np.zeros((2, len(lengths), width))
    for row, parts in enumerate(zip(rewards, values, strict=True)):
        for side, part in enumerate(parts):
            table[side, row, : lengths[row]] = part
    advantages, returns = gae(table[0], table[1], gamma=gamma, lam=lam)
    return [a[:n] for a, n in zip(advantages, lengths, strict=True)], [
        r[:n] for r, n in zip(returns, lengths, strict=True)
    ]


def returns_to_go(rewards: Array, mask: Array, gamma: float = 1.0) -> Array:
    """Discounted sum of this and all later rewards, beginning again at 0 where the mask is 0."""
    returns = np.zeros_like(rewards)
    later = np.zeros_like(rewards[..., 0])
    for t in reversed(range(rewards.shape[-1])):
        returns[..., t] = rewards[..., t] + gamma * later
        later = returns[..., t] * mask[..., t]
    return returns


def whiten(values: Array, mask: Array | None = None, *, shift_mean: bool = True) -> Array:
    """Values divided by their standard deviation (unbiased), about 0 or, without `shift_mean`, about their mean.

    Mean and deviation are of what the mask lets through; they are applied to everything. A single value has no
    deviation and stays as it is (0 where the mean is shifted away).
    """
    kept = values if mask is None else values[mask.astype(bool)]
    if not kept.size:
        return values
    mean = kept.mean()
    spread = kept.var(ddof=1) if kept.size > 1 else 1.0
    whitened = (values - mean) / np.sqrt(spread + 1e-8)
    return whitened if shift_mean else whitened + mean


def kl_penalties(logprobs: Array, reference: Array, kind: KlKind = "k1") -> Array:
    """A KL estimate for each token, as a plain number."""
    return kl_estimate(kind, torch.from_numpy(logprobs), torch.from_numpy(reference)).numpy()


def rewards_with_kl(scores: Array, kl: Array, coefficient: float) -> Array:
    """Rewards of tokens, less a KL penalty for each of them."""
    return scores - coefficient * kl


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
    rows, width = response_ids.shape
    response = until_stop(response_ids, stop_token_id)
    last = response.sum(-1) - 1
    stopped = (response_ids == stop_token_id).any(-1) & (last >= min_response_length)
    if missing_stop_score is not None:
        scores = np.where(stopped, scores, missing_stop_score)
    if missing_eos_penalty is not None:
        scores = np.where(stopped, scores, scores - missing_eos_penalty)
    place = np.minimum(last + 1, width - 1)
    valued = (np.arange(width) <= place[:, None]).astype(np.int64)
    kl = kl_penalties(log_probs, ref_log_probs, kl_estimator) * response
    at_end = np.zeros_like(kl)
    at_end[np.arange(rows), place] = scores
    rewards = rewards_with_kl(at_end, kl, kl_coef)
    if whiten_rewards:
        rewards = whiten(rewards, valued, shift_mean=False) * valued
    values = values * valued
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    return PpoTargets(
        sequence_lengths=last,
        contains_stop=stopped.astype(np.int64),
        response_mask=response,
        value_mask=valued,
        scores=scores,
        kl=kl,
        rewards=rewards,
        values=values,
        advantages=whiten(advantages, response) * response,
        returns=returns,
        rlhf_reward=scores - kl_coef * kl.sum(-1),
    )
