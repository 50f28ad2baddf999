"""Advantages of several rewards, each normalised by itself (GDPO): rewards of different scales then count according to
their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lemma.algorithms.parts.advantages import compared, learns, write_advantages
from lemma.algorithms.parts.flat_advantages import as_rewards, group_advantages, numbered, split_like, standardised
from lemma.core.types import Group


def assign_each(groups: Sequence[Group], weights: Mapping[str, float], epsilon: float) -> None:
    """Advantages of the weighted sums, over all groups."""
    tables = [_table(group, weights) for group in groups]
    if tables:
        rows, numbers = np.concatenate(tables), numbered(tables)
        advantages = summed_advantages(rows, list(weights.values()), numbers, epsilon=epsilon)
        write_advantages(groups, split_like(tables, advantages))


def any_differs(group: Group, weights: Mapping[str, float], epsilon: float) -> bool:
    """Whether any reward with a weight gives a trained sample of this group an advantage."""
    columns = zip(_table(group, weights).T, weights.values(), strict=True)
    return any(
        learns(group, compared([column], "mean", scale="group", epsilon=epsilon)[0])
        for column, weight in columns
        if weight
    )


def _table(group: Group, weights: Mapping[str, float]) -> np.ndarray:
    """The named rewards of every episode (R, K); NaN where one does not apply."""
    table = [[episode[0].rewards.get(name, np.nan) for name in weights] for episode in group.episodes]
    return np.array(table, dtype=np.float64).reshape(len(table), len(weights))


def summed_advantages(
    rewards_RK: Any, weights_K: Sequence[float], groups_R: Any, *, epsilon: float = 1e-4
) -> np.ndarray:
    """Each of K rewards normalised within its group, then summed by weight, then normalised over the batch (GDPO)."""
    table = as_rewards(rewards_RK)
    columns = [group_advantages(column, groups_R, scale="group", epsilon=epsilon) for column in table.T]
    summed = total_rewards(np.where(np.isnan(table), np.nan, np.stack(columns, axis=1)), weights_K)
    return standardised(summed, epsilon=epsilon)


def total_rewards(rewards_RK: Any, weights_K: Sequence[float] | None = None) -> np.ndarray:
    """The weighted sum of the K rewards of each row, ignoring missing ones; NaN if all are missing."""
    table = as_rewards(rewards_RK)
    assert table.ndim == 2
    weights = np.ones(table.shape[1]) if weights_K is None else np.asarray(weights_K, dtype=np.float64)
    sums = np.nansum(table * weights, axis=1)
    return np.where(np.isnan(table).all(axis=1), np.nan, sums)
