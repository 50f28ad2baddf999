"""Several rewards into one: the weighted sum, and the distribution of each under its name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lemma.core.deadlines import Overdue
from lemma.core.errors import Interruption, UserError
from lemma.rewards.failures import RewardFailed, late, shown
from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput

# The square of a reward, needed for standard deviations, must be finite in single precision.
LARGEST = 1e18


@dataclass(frozen=True, slots=True)
class Scored:
    """The rewards of one completion: each by name before its weight, and their weighted sum.

    `total` is None if no reward applies, or if a reward needs or reads a verdict, of our grader or another system's,
    and it is unknown: such a completion is left out, because an error never becomes a reward.
    """

    total: float | None
    parts: Mapping[str, float | None]


def combine(rewards: Sequence[Reward], items: Sequence[RewardInput]) -> list[Scored]:
    """Score every completion with every reward, in order. If one crashes, the error names it and the completion."""
    if not items:
        return []
    names = labels(rewards)
    graded = any(reward.needs_verdict for reward in rewards)
    if graded:
        for item in items:
            item.ask()
    columns = [_column(reward, name, items) for reward, name in zip(rewards, names, strict=True)]
    for reward, name, column in zip(rewards, names, columns, strict=True):
        _check_sizes(reward, name, column, items)
    rows = zip(*columns, strict=True) if columns else ((),) * len(items)
    return [
        Scored(_total(rewards, values, item), dict(zip(names, values, strict=True)))
        for values, item in zip(rows, items, strict=True)
    ]


def _total(rewards: Sequence[Reward], values: Sequence[float | None], item: RewardInput) -> float | None:
    """The weighted sum of the rewards of one completion; None if it is left out."""
    known, needed, unknown = [], item.looked, False
    for reward, value in zip(rewards, values, strict=True):
        if value is not None:
            known.append(value * reward.weight)
        else:
            needed |= reward.needs_verdict
            unknown |= reward.leaves_out
    return None if not known or unknown or (needed and item.verdict.kind == "unknown") else math.fsum(known)


def labels(rewards: Sequence[Reward]) -> list[str]:
    """The name under which each reward is logged; a second one of the same name gets a number."""
    seen: dict[str, int] = {}
    out = []
    for reward in rewards:
        seen[reward.label] = seen.get(reward.label, 0) + 1
        out.append(reward.label if seen[reward.label] == 1 else f"{reward.label}_{seen[reward.label]}")
    return out


def _column(reward: Reward, name: str, items: Sequence[RewardInput]) -> list[float | None]:
    """One reward's values for all completions."""
    if not reward.is_ours:
        from lemma.rewards.outside_rewards import outside_column

        return outside_column(reward, name, items)
    scored: list[RewardInput] = []
    with blamed(reward, name, scored):
        if type(reward).score_all is not Reward.score_all:
            scored[:] = items
            return reward.score_all(items)
        values: list[float | None] = []
        for item in items:
            scored[:] = [item]
            values.append(reward.score(item))
        return values


@contextmanager
def blamed(reward: Reward, name: str, items: Sequence[RewardInput]) -> Iterator[None]:
    """Within `with`, a reward scores these, or those that are put there meanwhile: an error that names it if it raises
    anything or takes too long."""
    try:
        yield
    except Overdue as error:
        raise late(reward, name, items) from error
    except (UserError, KeyboardInterrupt, Interruption):
        raise
    except BaseException as error:
        raise RewardFailed(reward, name, items[0].completion, error) from error


def _check_sizes(reward: Reward, name: str, column: Sequence[float | None], items: Sequence[RewardInput]) -> None:
    """Refuse rewards that are not finite or too large: means and deviations would be infinite or NaN."""
    for value, item in zip(column, items, strict=True):
        # Written so that NaN is refused as well.
        if value is not None and not max(abs(value), abs(value * reward.weight)) <= LARGEST:
            times = "" if reward.weight == 1 else f" times its weight {reward.weight:g}"
            file, line = reward.place or (None, None)
            raise UserError(
                f"reward '{name}' is {value:g}{times} on the completion {shown(item.completion)!r}, "
                f"and beyond {LARGEST:g} no training is possible",
                file=file,
                line=line,
                fix="make it smaller",
            )


def distributions(scored: Sequence[Scored]) -> dict[str, float]:
    """Metrics of the sum and of each reward: mean, standard deviation, extremes, and the share without a value."""
    columns: dict[str, list[float | None]] = {"reward": [row.total for row in scored]}
    for row in scored:
        for name, value in row.parts.items():
            columns.setdefault(f"rewards/{name}", []).append(value)
    out: dict[str, float] = {}
    for name, column in columns.items():
        values = [value for value in column if value is not None]
        out[f"{name}/absent"] = 1 - len(values) / len(column) if column else 0.0
        if values:
            mean = math.fsum(values) / len(values)
            out[f"{name}/mean"] = mean
            out[f"{name}/std"] = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
            out[f"{name}/min"], out[f"{name}/max"] = min(values), max(values)
    return out
