"""The metrics of samples that are older than the weights that are trained on them (`rollout.lag`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lemma.rollouts import Rollouts


def staleness(rollouts: Rollouts, step: int) -> dict[str, float]:
    """How many updates lie between the weights that sampled a token and those that are trained on it; and the share of
    responses sampled by several versions."""
    turns = [turn for episode in rollouts.episodes for turn in episode.turns if turn.finish != "given"]
    tokens: Counter[int] = Counter()
    for turn in turns:
        ends = [*(first for first, _ in turn.versions[1:]), len(turn.ids)]
        for (first, version), end in zip(turn.versions, ends, strict=True):
            tokens[step - 1 - version] += end - max(first, turn.given)
    ages = +tokens
    if not ages:
        return {}
    return {
        "staleness/mean": sum(age * count for age, count in ages.items()) / ages.total(),
        "staleness/max": float(max(ages)),
        "staleness/mixed": sum(len(turn.versions) > 1 for turn in turns) / len(turns),
    }


def sample_size(values: Mapping[str, float]) -> dict[str, float]:
    """The effective sample size as a share: (sum of w)^2 / (n sum of w^2) over the weights of tokens."""
    square = values.get("mismatch/square", 0.0)
    return {"effective_samples": values["mismatch/weight"] ** 2 / square} if square else {}
