"""Token advantages if turns of an episode are rewarded one by one, or later tokens are discounted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lemma.algorithms.parts.advantages import divisor
from lemma.algorithms.parts.episode_tokens import of_episode, write_episodes
from lemma.algorithms.parts.loss_options import Scale
from lemma.core.types import Group, Trajectory

Attempt = Sequence[Trajectory]


def is_paid(groups: Sequence[Group]) -> bool:
    """Whether any turn of these groups has a reward of its own."""
    return any(of_episode(episode, "paid").any() for group in groups for episode in group.episodes)


def has_returns(group: Group, advantages: Sequence[float] | np.ndarray, *, centred: bool) -> bool:
    """Whether any trained token of a group has a return, by its turns' rewards and these advantages of its episodes."""
    paid = paid_at(group.episodes, centred=centred)
    return any(rest_at_end(row, float(whole)).any() for row, whole in zip(paid, advantages, strict=True))


def divisors(rewards: Sequence[np.ndarray], scale: Scale, epsilon: float) -> list[float]:
    """The divisor of each group's advantages."""
    if scale == "batch":
        return [divisor(np.concatenate([np.zeros(0), *rewards]), epsilon)] * len(rewards)
    return [divisor(group, epsilon) if scale == "group" else 1.0 for group in rewards]


def write_returns(
    groups: Sequence[Group], gamma: float, *, whitened: bool, divided_by: Sequence[float], centred: bool
) -> None:
    """Replace each token's advantage with its return: the rewards of this and later turns, plus the rest of the
    episode's advantage on the last token, discounted by `gamma` per token. `whitened` over all tokens of the batch.

    Turn rewards are divided like the advantages of their group. `centred`: a turn's reward is compared with the mean of
    the group's turns with the same number, as an episode's reward is with the group's mean.
    """
    from lemma.objectives.gae import padded, returns_to_go, whiten

    episodes = [episode for group in groups for episode in group.episodes]
    rewards = []
    for group, by in zip(groups, divided_by, strict=True):
        for episode, paid in zip(group.episodes, paid_at(group.episodes, centred=centred), strict=True):
            whole = of_episode(episode, "advantage")[-1:]
            rewards.append(rest_at_end(paid / by, float(whole.sum())))
    rows, mask = padded(rewards)
    returns = returns_to_go(rows, mask, gamma)
    write_episodes("advantage", episodes, whiten(returns, mask) if whitened else returns)


def rest_at_end(paid: np.ndarray, total: float) -> np.ndarray:
    """Token rewards that sum to `total`: those of turns, and the rest on the last token."""
    rewards = paid.copy()
    if len(rewards):
        rewards[-1] += total - paid.sum()
    return rewards


def paid_at(episodes: Sequence[Attempt], *, centred: bool) -> list[np.ndarray]:
    """The turn reward at each chosen token of each episode; if `centred`, minus the mean over turns with the same
    number."""
    rows = [of_episode(episode, "paid") for episode in episodes]
    if not centred or not any(row.any() for row in rows):
        return rows
    numbers = [of_episode(episode, "turn") for episode in episodes]
    by_turn: dict[float, list[float]] = {}
    for row, turns in zip(rows, numbers, strict=True):
        for turn in np.unique(turns).tolist():
            by_turn.setdefault(turn, []).append(float(row[turns == turn].sum()))
    # The mean of equal numbers may differ from them by rounding.
    means = {turn: pays[0] if len(set(pays)) == 1 else sum(pays) / len(pays) for turn, pays in by_turn.items()}
    return [_minus_means(row, turns, means) for row, turns in zip(rows, numbers, strict=True)]


def _minus_means(row: np.ndarray, turns: np.ndarray, means: Mapping[float, float]) -> np.ndarray:
    less = row.copy()
    for turn in np.unique(turns).tolist():
        less[np.flatnonzero(turns == turn)[-1]] -= means[turn]
    return less
