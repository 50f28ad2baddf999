"""The numbers of a step of reinforcement learning, from its samples and groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lemma.core.types import Group
from lemma.rewards import Scored, distributions
from lemma.rollouts import Rollouts, Sample


def rollout_metrics(rollouts: Rollouts, batch: Sequence[Group], worth: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and formats of what the policy sampled; shares of groups; a teacher's share apart."""
    own = [sample for sample in rollouts.samples if sample.origin == "policy"]
    taught = [sample for sample in rollouts.samples if sample.given]
    groups = max(len(rollouts.groups), 1)
    values = distributions([Scored(sample.reward, sample.rewards) for sample in own])
    values |= _samples(own)
    values |= {
        "samples": float(len(rollouts.samples)),
        "generated_tokens": float(sum(len(sample.ids) - sample.given for sample in rollouts.samples)),
        "unscored": float(rollouts.unscored),
        "groups/live": len(worth) / groups,
        "groups/dead": rollouts.dead / max(rollouts.drawn, 1),
        "groups/all_right": _share(batch, all),
        "groups/none_right": _share(batch, lambda right: not any(right)),
        "rounds": float(rollouts.rounds),
        "missing_groups": float(max(0, rollouts.wanted - len(rollouts.groups))),
    }
    advantages = [t.token_fields["advantage"][t.chosen_T] for group in batch for t in group.trajectories]
    flat = np.concatenate(advantages) if advantages else np.zeros(0)
    if len(flat):
        values |= {"advantage/mean": float(flat.mean()), "advantage/std": float(flat.std())}
        values |= {"advantage/max": float(flat.max()), "advantage/min": float(flat.min())}
    if taught:
        values |= {f"off_policy/{name}": value for name, value in _samples(taught).items()}
        values["off_policy/samples"] = float(len(taught))
        values["off_policy/reward"] = _mean([s.reward for s in taught if s.reward is not None])
        values["off_policy/prefix_share"] = _mean([s.given / len(s.ids) for s in taught])
        values["off_policy/long_traces"] = float(rollouts.long_traces)
    return values


def _samples(samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [float(len(sample.ids)) for sample in samples]
    right = [sample.right for sample in samples]
    return {
        "right": _mean(right),
        "format": _mean([sample.format_ok for sample in samples]),
        "truncated": _mean([sample.truncated for sample in samples]),
        "length/mean": _mean(lengths),
        "length/max": max(lengths, default=0.0),
        "length/right": _mean([length for length, ok in zip(lengths, right, strict=True) if ok]),
        "length/wrong": _mean([length for length, ok in zip(lengths, right, strict=True) if not ok]),
        "reasoning/present": _mean([bool(sample.reasoning and sample.reasoning.strip()) for sample in samples]),
    }


def _share(groups: Sequence[Group], holds: object) -> float:
    """Share of the groups in which this holds of which trajectories have the group's best reward."""
    assert callable(holds)
    tops = [[t.rewards["total"] > 0 for t in group.trajectories] for group in groups]
    return _mean([bool(holds(top)) for top in tops])


def _mean(values: Sequence[float | bool]) -> float:
    return float(sum(values) / len(values)) if values else 0.0
