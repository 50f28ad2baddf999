"""The metrics of an RL step, from its samples, groups and updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from lemma.algorithms import Algorithm, rewards_of
from lemma.core.types import Group
from lemma.learning.learner import StepReport
from lemma.rewards import Scored, distributions
from lemma.rollouts import Episode, Rollouts


def rollout_metrics(rollouts: Rollouts, batch: Sequence[Group], *, by_verdict: bool) -> dict[str, float]:
    """Rewards, lengths and formats of the policy's samples; shares of groups; a teacher's samples separately.

    Shares are of all groups drawn, including replaced ones. A sample is right `by_verdict` or, if no reward asks for a
    verdict, if its reward is above 0.
    """
    taught = [sample for sample in rollouts.episodes if sample.given]
    # If a teacher begins every sample, the rest is still the policy's own.
    own = [s for s in rollouts.episodes if not s.given] if taught else rollouts.episodes
    own = own or [s for s in rollouts.episodes if s.origin == "policy"]
    dead = rollouts.without_signal / max(rollouts.drawn, 1)
    draws = _by_draw(own)
    right = [[one.verdict == "right" if by_verdict else (one.reward or 0.0) > 0 for one in draw] for draw in draws]
    rewards = [{(one.reward, *one.rewards.values()) for one in draw} for draw in draws]
    known = [sample.reward for sample in own if sample.reward is not None]
    values = distributions([Scored(sample.reward, sample.rewards) for sample in own])
    values |= _samples(own)
    values |= {
        "entropy/sampled": _surprisal(own),
        "samples": float(len(rollouts.episodes)),
        "generated_tokens": float(sum(episode.tokens for episode in rollouts.episodes)),
        "unscored": float(rollouts.unscored),
        "groups/live": 1.0 - dead,
        "groups/dead": dead,
        "groups/varied": _mean([len(different) > 1 for different in rewards]),
        "reward/commonest": max(Counter(known).values(), default=0) / max(len(known), 1),
        "groups/all_right": _mean([all(group) for group in right]),
        "groups/none_right": _mean([not any(group) for group in right]),
        "rounds": float(rollouts.rounds),
        "missing_groups": float(max(0, rollouts.wanted - len(rollouts.groups))),
    }
    if any(len(episode.turns) > 1 for episode in rollouts.episodes):
        values |= _turns(own)
    if any(turn.calls for episode in own for turn in episode.turns):
        values |= _calls(own)
    learnt = [t for group in batch for t in group.trajectories]
    if any(t.trained_tokens for t in learnt):
        chosen = np.concatenate([t.loss_mask_T for t in learnt])
        flat = np.concatenate([t.token_fields["advantage"] for t in learnt])[chosen]
        values |= {"advantage/mean": float(flat.mean()), "advantage/std": float(flat.std())}
        values |= {"advantage/max": float(flat.max()), "advantage/min": float(flat.min())}
    if taught:
        values |= {f"off_policy/{name}": value for name, value in _samples(taught).items()}
        values["off_policy/samples"] = float(len(taught))
        values["off_policy/reward"] = _mean([s.reward for s in taught if s.reward is not None])
        values["off_policy/prefix_share"] = _mean([s.given / len(s.ids) for s in taught])
    if taught or rollouts.long_traces:
        values["off_policy/long_traces"] = float(rollouts.long_traces)
    return values


def credited_metrics(algorithm: Algorithm, batch: Sequence[Group]) -> dict[str, float]:
    """The mean reward as the algorithm takes it, where that is not the mean reward of the batch."""
    credited = np.concatenate([np.zeros(0), *map(algorithm.credited, batch)])
    given = np.concatenate([np.zeros(0), *map(rewards_of, batch)])
    return {} if np.array_equal(credited, given) else {"reward/credited": float(credited.mean())}


def update_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """Means over the updates of a step; maxima if the name says so."""
    values = {
        "updates": float(len(reports)),
        "loss": _mean([r.loss for r in reports]),
        "grad_norm": _mean([r.grad_norm for r in reports]),
        "trained_tokens": float(sum(r.trained_tokens for r in reports)),
        "packs": float(sum(r.packs for r in reports)),
        "updated": _mean([float(r.updated) for r in reports]),
    }
    for name in sorted({name for report in reports for name in report.metrics}):
        known = [report.metrics[name] for report in reports if name in report.metrics]
        values[name] = max(known) if name.endswith("/max") else _mean(known)
    # Engine and learner have the same weights only at the first update.
    return values | {name: reports[0].metrics[name] for name in ("mismatch/mean", "mismatch/max") if name in values}


def _surprisal(samples: Sequence[Episode]) -> float:
    """The mean negative log-probability of all sampled tokens, summed sequentially."""
    parts = [sample.logprobs[sample.given :] for sample in samples]
    whole = 0.0 - np.concatenate([np.zeros(0), *parts])
    return float(np.add.accumulate(whole)[-1]) / len(whole) if len(whole) else 0.0


def _samples(samples: Sequence[Episode]) -> dict[str, float]:
    """Numbers of these samples; nothing about right answers where no problem has a gold."""
    lengths = [float(len(sample.ids)) for sample in samples]
    right = [sample.verdict == "right" for sample in samples]
    graded = {
        "right": _mean(right),
        "length/right": _mean([length for length, ok in zip(lengths, right, strict=True) if ok]),
        "length/wrong": _mean([length for length, ok in zip(lengths, right, strict=True) if not ok]),
    }
    has_gold = not samples or any(sample.reason != "no_gold" for sample in samples)
    return (graded if has_gold else {}) | {
        "format": _mean([sample.format_ok for sample in samples]),
        "truncated": _mean([sample.finish == "length" for sample in samples]),
        "length/mean": _mean(lengths),
        "length/max": max(lengths, default=0.0),
        "reasoning/present": _mean([bool(sample.reasoning and sample.reasoning.strip()) for sample in samples]),
    }


def _turns(own: Sequence[Episode]) -> dict[str, float]:
    return {
        "turns/mean": _mean([len(episode.turns) for episode in own]),
        "turns/replies_cut": float(sum(turn.cut for episode in own for turn in episode.turns)),
        "turns/limit": float(sum(episode.reason.startswith("limit") for episode in own)),
        "turns/max": float(max((len(episode.turns) for episode in own), default=0)),
    }


def _calls(episodes: Sequence[Episode]) -> dict[str, float]:
    """Tool calls per episode, and the share that could not be made."""
    calls = [sum(turn.calls for turn in episode.turns) for episode in episodes]
    bad = sum(turn.bad_calls for episode in episodes for turn in episode.turns)
    return {"calls/mean": _mean(calls), "calls/bad_share": bad / sum(calls)}


def _by_draw(samples: Sequence[Episode]) -> list[list[Episode]]:
    """The samples of each draw; those without a reward do not count."""
    draws: dict[tuple[str | int, ...], list[Episode]] = {}
    for sample in samples:
        if sample.reward is not None:
            draws.setdefault(sample.key[:3], []).append(sample)
    return list(draws.values())


def _mean(values: Sequence[float | bool]) -> float:
    return float(sum(values) / len(values)) if values else 0.0
