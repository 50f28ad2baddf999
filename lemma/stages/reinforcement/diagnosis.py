"""Diagnosis of a run while it runs: the bottleneck of each step, and when a warning is due (`advice` has the words)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lemma.engines.mismatch import WARNING_MEAN, warning_mean
from lemma.stages.reinforcement import advice
from lemma.stages.reinforcement.rl_options import ReinforcementOptions

# Steps between two warnings of the same kind.
PAUSE = 20
# KL per token, in nats, between the policy and the one that sampled its batch: from STALE on the batch is of little
# use, from FAR on something is wrong.
STALE, FAR = 0.1, 0.5
# Minimum effective sample size, as a share, with the importance weights of older versions.
LEAST_SHARE = 0.3
# Advice about groups needs this many of them: with few problems per step, several steps are combined.
LEAST_GROUPS = 8
SHARES = (
    *("truncated", "format", "groups/live", "groups/varied", "groups/all_right", "groups/none_right"),
    *("reward/commonest", "samples", "unscored", "off_policy/long_traces"),
)
"""Metrics that are means over the groups or samples of a step, and say little if those are few."""
PARTS = ("generate", "grade", "score", "update", "checkpoint", "evaluate")


@dataclass
class Seen:
    """Input of the checks: the metrics of a step, the recipe, the first entropy of the stage, and the supervised stage
    before it, if there is any."""

    values: Mapping[str, float]
    options: ReinforcementOptions
    max_tokens: int
    first_entropy: float
    taught_in: str | None = None

    def __call__(self, name: str, default: float = 0.0) -> float:
        return self.values.get(name, default)

    @property
    def kl(self) -> float:
        """Nats per token from the reference; as part of the reward it is known per sample."""
        return self("kl", self("kl_seen") / max(self("length/mean"), 1.0))

    @property
    def taught(self) -> float:
        """The share of groups whose rewards tell which sample is better; all or none if an algorithm compares over the
        whole batch. A group may have a signal for other reasons: it is imitated, or there is a critic."""
        algorithm, live = self.options.algorithm, self("groups/live", 1.0)
        if not algorithm.compares:
            return 0.0 if self("reward/commonest") > 0.99 else live
        varied = self("groups/varied", 1.0)
        # With a teacher's samples in the group, one right one of those among wrong ones is enough.
        return live if varied >= live or algorithm.compares_traces else varied

    @property
    def is_parsed(self) -> bool:
        """Whether the format decides about the reward: environments, and functions that get only the text, parse for
        themselves."""
        options = self.options
        own = all(reward.name in ("trl", "verl", "openrlhf") for reward in options.rewards)
        return options.environment.is_single_turn and not own

    @property
    def is_stale(self) -> bool:
        """Whether the policy has moved too far from its batch. The share of clipped samples is naturally large, that of
        clipped tokens is not; LUFFY does not measure the KL."""
        if self.options.algorithm.ratio_level == "token" and max(self("clip/region"), self("clip/high")) > 0.3:
            return True
        return self("kl/old") > STALE if "kl/old" in self.values else self("ratio/max", 1.0) > 10.0


class Check(NamedTuple):
    """When something is to be said, and what."""

    when: Callable[[Seen], bool]
    words: Callable[[Seen], str]


CHECKS = {
    "truncation": Check(lambda seen: seen("truncated") > 0.9, advice.truncation),
    "dead groups": Check(lambda seen: seen.taught < 0.1, advice.dead_groups),
    "format": Check(lambda seen: seen("format", 1.0) < 0.02 and seen.is_parsed, advice.format_missed),
    "missing groups": Check(lambda seen: seen("missing_groups") > 0, advice.missing_groups),
    # A policy that is right everywhere needs no entropy.
    "entropy": Check(
        lambda seen: seen("entropy/sampled") < 0.1 * seen.first_entropy and seen("groups/all_right") <= 0.8,
        advice.low_entropy,
    ),
    "noise": Check(
        lambda seen: seen("entropy/sampled") > max(2.0 * seen.first_entropy, seen.first_entropy + 2.0), advice.noise
    ),
    "kl": Check(lambda seen: seen.kl > 1.0, advice.far_from_reference),
    # How far the updates of one step went, where a batch is used more than once.
    "moved": Check(lambda seen: seen("kl/old") > FAR, advice.moved),
    "ratio": Check(lambda seen: seen("ratio/max", 1.0) > 100.0, advice.large_ratio),
    # Older weights are expected to disagree.
    "mismatch": Check(
        lambda seen: (
            seen("mismatch/mean") > WARNING_MEAN
            and seen("mismatch/mean") > warning_mean(seen("mismatch/rounding"))
            and not seen("staleness/max")
        ),
        advice.mismatch,
    ),
    "old samples": Check(lambda seen: seen("effective_samples", 1.0) < LEAST_SHARE, advice.old_samples),
    "not finite": Check(lambda seen: seen("updates") > 0 and not seen("updated", 1.0), advice.not_finite),
    "unscored": Check(lambda seen: seen("unscored") > 0.2 * max(seen("samples"), 1.0), advice.unscored),
    "long traces": Check(
        lambda seen: seen("off_policy/long_traces") > 0.5 * seen.options.batch.problems, advice.long_traces
    ),
}
OF_GROUPS = {"truncation", "dead groups", "format"}
"""Checks on shares of groups and samples, which wait until they have seen enough of them."""


class Diagnosis:
    """Looks at the metrics of every step. A warning of one kind is repeated only after a pause."""

    def __init__(
        self,
        options: ReinforcementOptions,
        max_tokens: int,
        warn: Callable[[str], None],
        taught_in: str | None = None,
    ):
        self.options, self.max_tokens, self.taught_in = options, max_tokens, taught_in
        self._warn = warn
        self._last: dict[str, int] = {}
        self._first_entropy: float | None = None
        self._recent: deque[dict[str, float]] = deque(maxlen=max(1, -(-LEAST_GROUPS // options.batch.problems)))

    def look(self, step: int, values: Mapping[str, float], spent: Mapping[str, float]) -> str:
        """Warn about problems; returns the name of the bottleneck. `spent` are seconds by part."""
        if self._first_entropy is None:
            self._first_entropy = values["entropy/sampled"]
        self._recent.append({name: values[name] for name in SHARES if name in values})
        means: dict[str, float] = {}
        for name in SHARES:
            if known := [step[name] for step in self._recent if name in step]:
                means[name] = sum(known) / len(known)
        of_steps = {**values, **means}
        seen = Seen(of_steps, self.options, self.max_tokens, self._first_entropy, self.taught_in)
        for name, check in CHECKS.items():
            if name in OF_GROUPS and len(self._recent) < (self._recent.maxlen or 1):
                continue
            if step - self._last.get(name, -PAUSE) >= PAUSE and check.when(seen):
                self._last[name] = step
                self._warn(f"step {step}: {check.words(seen)}")
        return bottleneck(replace(seen, values=values), spent)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        extra = {"last": dict(self._last), "first_entropy": self._first_entropy, "recent": list(self._recent)}
        return {}, extra

    def load(self, tensors: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._last, self._first_entropy = dict(extra["last"]), extra["first_entropy"]
        self._recent.extend(extra.get("recent", []))


def bottleneck(seen: Seen, spent: Mapping[str, float]) -> str:
    """The bottleneck in a few words: a part of the step's time, or samples that teach little or nothing."""
    if seen("truncated") > 0.5:
        return "truncation"
    if seen.taught < 0.3:
        return "dead groups"
    if seen.is_stale:
        return "stale ratio"
    return max(PARTS, key=lambda part: spent.get(part, 0.0))
