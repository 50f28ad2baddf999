"""PPO's targets: rewards with a KL penalty, generalised advantage estimates, whitening.

Plain numpy: these numbers are constants of an update. Time is the last axis; padded rows and a single sequence are
treated alike. Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from lemma.objectives.policy_loss import KlKind, kl_estimate

Array = np.ndarray


def gae(
    rewards: Array, values: Array, *, gamma: float = 1.0, lam: float = 0.95, goes_on: Array | None = None
) -> tuple[Array, Array]:
    """Generalised advantage estimates, and returns (advantage plus value), along the last axis.

    Nothing follows the last token. `goes_on` is 0 at any earlier token that nothing follows either.
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


def returns_to_go(rewards: Array, mask: Array, gamma: float = 1.0) -> Array:
    """Discounted sum of this and all later rewards, reset to 0 where the mask is 0."""
    returns = np.zeros_like(rewards)
    later = np.zeros_like(rewards[..., 0])
    for t in reversed(range(rewards.shape[-1])):
        returns[..., t] = rewards[..., t] + gamma * later
        later = returns[..., t] * mask[..., t]
    return returns


def whiten(values: Array, mask: Array | None = None, *, shift_mean: bool = True) -> Array:
    """Values divided by their standard deviation (unbiased), about 0 or, without `shift_mean`, about their mean.

    Mean and deviation are computed within the mask and applied to everything. A single value has no deviation and is
    left unscaled (0 if the mean is subtracted).
    """
    kept = values if mask is None else values[mask.astype(bool)]
    count = kept.size
    if not count:
        return values
    mean = kept.sum() / count
    squares = np.square(kept - mean).sum()
    spread = squares / (count - 1) if count > 1 else 1.0
    whitened = (values - mean) / np.sqrt(spread + 1e-8)
    return whitened if shift_mean else whitened + mean


def kl_penalties(logprobs: Array, reference: Array, kind: KlKind = "k1") -> Array:
    """A KL estimate for each token, as a plain number."""
    return kl_estimate(kind, torch.from_numpy(logprobs), torch.from_numpy(reference)).numpy()


def rewards_with_kl(scores: Array, kl: Array, coefficient: float) -> Array:
    """Token rewards minus a KL penalty for each token."""
    return scores - coefficient * kl


def padded(parts: Sequence[Array]) -> tuple[Array, Array]:
    """Sequences as rows padded with 0 on the right, and a mask of the real entries."""
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    mask = np.arange(max([1, *lengths])) < lengths[:, None]
    rows = np.zeros(mask.shape)
    rows[mask] = np.concatenate([np.zeros(0), *parts])
    return rows, mask.astype(np.int64)


def scores_by_end(
    scores: Array, ended: Array, *, missing_score: float | None = None, missing_penalty: float | None = None
) -> Array:
    """Scores in which a response without an end gets `missing_score`, or loses `missing_penalty`."""
    if missing_score is not None:
        scores = np.where(ended, scores, missing_score)
    if missing_penalty is not None:
        scores = np.where(ended, scores, scores - missing_penalty)
    return scores


@dataclass(frozen=True)
class TokenTargets:
    """The targets of PPO's policy and critic, all as padded rows; 0 outside the masks."""

    value_mask: Array
    rewards: Array
    values: Array
    advantages: Array
    returns: Array


def token_targets(
    scores: Array,
    kl: Array,
    values: Array,
    response: Array,
    *,
    score_on: Literal["last", "after"],
    kl_coef: float,
    whiten_rewards: bool,
    whiten_advantages: bool,
    gamma: float,
    lam: float,
    paid: Array | None = None,
) -> TokenTargets:
    """PPO's targets from the scores (B,) of responses and the KL and value (B, T) of their tokens.

    Each row of the mask `response` is 1 from its beginning to its end. The score goes `on` the last token, or one
    position `after` it if the row has room; that position's value then counts too. `paid` (B, T) are additional token
    rewards.
    """
    rows, width = response.shape
    last = response.sum(-1) - 1
    place = np.minimum(last + 1, width - 1) if score_on == "after" else last
    valued = (np.arange(width) <= place[:, None]).astype(np.int64)
    at_end = np.zeros_like(values)
    at_end[np.arange(rows), place] = scores
    if paid is not None:
        at_end = at_end + paid * response
    rewards = rewards_with_kl(at_end * valued, kl * response, kl_coef)
    if whiten_rewards:
        rewards = whiten(rewards, valued, shift_mean=False) * valued
    values = values * valued
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    if whiten_advantages:
        advantages = whiten(advantages, response)
    return TokenTargets(valued, rewards, values, advantages * response, returns)
