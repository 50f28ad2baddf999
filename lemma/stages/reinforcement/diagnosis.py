"""Diagnosis of a run while it runs: the bottleneck of each step, and warnings with the setting that helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lemma.engines.mismatch import warning_mean
from lemma.evaluation.diagnose import how_to_teach
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


# Settings are written `like.this`, relative to the stage.


@dataclass
class Seen:
    """Input of the checks: the metrics of a step, the recipe, the first entropy of the stage, and the supervised stage
    before it, if there is any."""

    values: Mapping[str, float]
    options: ReinforcementOptions
    max_tokens: int
    first_entropy: float | None
    taught_in: str | None = None

    @property
    def teach(self) -> str:
        return how_to_teach(self.taught_in)

    def __call__(self, name: str, default: float = 0.0) -> float:
        return self.values.get(name, default)

    def settings(self, *names: str) -> str:
        """Those of these options that the algorithm has, in words; empty if it has none."""
        own = [f"`algorithm.{name}`" for name in names if name in type(self.options.algorithm).model_fields]
        return " or ".join(own)


def _truncation(seen: Seen) -> str | None:
    if seen("truncated") <= 0.9:
        return None
    return (
        f"{seen('truncated'):.0%} of the completions are cut off at {seen.max_tokens} tokens; raise "
        f"`rollout.max_tokens`, or teach the model to end: {seen.teach}"
    )


def _taught(seen: Seen) -> float:
    """The share of groups whose rewards tell which sample is better; all or none if an algorithm compares over the
    whole batch. A group may be live for other reasons: it is imitated, or there is a critic."""
    algorithm, live = seen.options.algorithm, seen("groups/live", 1.0)
    if not algorithm.compares:
        return 0.0 if seen("reward/commonest") > 0.99 else live
    if algorithm.compares_traces:
        return live  # one right sample of a teacher among wrong ones is enough
    return min(live, seen("groups/varied", 1.0))


def _dead(seen: Seen) -> str | None:
    if _taught(seen) >= 0.1:
        return None
    if seen("groups/all_right") > 0.8:
        return (
            "nearly every group is right throughout: there is nothing left to learn; choose harder problems in `data`"
        )
    if seen("groups/none_right") > 0.8:
        luffy = "" if seen.options.algorithm.uses_traces else ", or use luffy with a teacher's traces"
        return (
            "nearly no group has a right completion, so rewards do not vary; choose easier problems in `data`, raise "
            f"`algorithm.group_size`, or {seen.teach}{luffy}"
        )
    if seen.options.truncated == "mask" and seen("truncated") > 0.5:
        return (
            f"{seen('truncated'):.0%} of the completions are cut off and `truncated: mask` leaves them out; raise "
            "`rollout.max_tokens`, or write `truncated: keep`"
        )
    advice = seen.options.algorithm.advice_without_signal
    if advice and seen("reward/commonest") <= 0.99:
        return advice
    return (
        "the rewards of nearly all groups do not vary; raise `algorithm.group_size` or `rollout.temperature`, or "
        "reward something else in `rewards`"
    )


def _format(seen: Seen) -> str | None:
    if seen("format", 1.0) >= 0.02 or not seen.options.environment.is_single_turn:  # an environment parses for itself
        return None
    # So do functions that only get the text.
    if all(reward.name in ("trl", "verl", "openrlhf") for reward in seen.options.rewards):
        return None
    return f"the format is almost never met; {seen.teach}, or choose another format, or pay for it in `rewards`"


def _missing(seen: Seen) -> str | None:
    if not seen("missing_groups"):
        return None
    return (
        f"{seen('missing_groups'):.0f} of {seen.options.batch.problems} groups are missing after "
        f"{seen('rounds'):.0f} rounds; raise `replace_dead`, or choose problems of another difficulty in `data`"
    )


def _entropy(seen: Seen) -> str | None:
    """A policy that is right everywhere needs no entropy; otherwise samples that do not differ teach nothing."""
    now = seen("entropy/sampled")
    if seen.first_entropy is None or now >= 0.1 * seen.first_entropy or seen("groups/all_right") > 0.8:
        return None
    raised = seen.settings("entropy", "clip_high")
    return (
        f"the entropy fell from {seen.first_entropy:.2g} to {now:.2g}: samples hardly differ; lower `optim.lr`"
        f"{f', or raise {raised}' if raised else ''}"
    )


def _noise(seen: Seen) -> str | None:
    """A policy that drifts towards noise. The optimiser scales any gradient to full steps: if rewards do not vary, the
    entropy bonus is the only gradient."""
    now = seen("entropy/sampled")
    if seen.first_entropy is None or now <= max(2.0 * seen.first_entropy, seen.first_entropy + 2.0):
        return None
    bonus = seen.options.algorithm.gives_entropy_bonus
    return (
        f"the entropy rose from {seen.first_entropy:.2g} to {now:.2g}: the policy forgets its language; "
        f"{'lower `algorithm.entropy`, or ' if bonus else ''}lower `optim.lr`"
    )


def _kl(seen: Seen) -> str | None:
    """The KL per token; as part of the reward it is known per sample."""
    nats = seen("kl", seen("kl_seen") / max(seen("length/mean"), 1.0))
    if nats <= 1.0:
        return None
    raised = seen.settings("kl", "reward_kl")
    return f"the policy is {nats:.2g} nats a token from the reference; lower `optim.lr` or raise {raised}"


def _moved(seen: Seen) -> str | None:
    """How far the updates of one step went, where a batch is used more than once."""
    if seen("kl/old") <= FAR:
        return None
    return (
        f"the policy is {seen('kl/old'):.2g} nats a token from the one that sampled its batch; lower `optim.lr`, "
        "`algorithm.epochs` or `algorithm.mini_batches`"
    )


def _ratio(seen: Seen) -> str | None:
    if seen("ratio/max", 1.0) <= 100.0:
        return None
    return (
        f"the largest ratio is {seen('ratio/max'):.2g}; lower `optim.lr`, `algorithm.epochs` or "
        "`algorithm.mini_batches`"
    )


def _mismatch(seen: Seen) -> str | None:
    limit = warning_mean(seen("mismatch/rounding"))
    if seen("mismatch/mean") <= limit or seen("staleness/max"):  # older weights are expected to disagree
        return None
    engine = seen.options.rollout.engine.name
    repairs = [f"weigh tokens by it with {cap} (2 is usual)"] if (cap := seen.settings("mismatch_cap")) else []
    if engine != "transformers":
        repairs.append("set `rollout.engine` to transformers to see whether the engine is at fault")
    return (
        f"the {engine} engine and the learner disagree about the tokens that were sampled: their log-probabilities "
        f"differ by {seen('mismatch/mean'):.2g} on average, and rounding explains {limit:.2g}; "
        f"{', or '.join(repairs) or 'compute in fp32'}"
    )


def _old_samples(seen: Seen) -> str | None:
    share = seen("effective_samples", 1.0)
    if share >= LEAST_SHARE:
        return None
    name = "rollout.lag_limit" if seen.options.rollout.lag == "flying" else "rollout.lag"
    return f"samples are {seen('staleness/mean'):.1f} updates old, and {share:.0%} of them are left; lower `{name}`"


def _not_finite(seen: Seen) -> str | None:
    if not seen("updates") or seen("updated", 1.0):
        return None
    return "the gradient is not finite and nothing was learnt; lower `optim.lr`"


def _unscored(seen: Seen) -> str | None:
    if seen("unscored") <= 0.2 * max(seen("samples"), 1.0):
        return None
    return (
        f"{seen('unscored'):.0f} of {seen('samples'):.0f} completions have no reward: their verdict is unknown "
        "or no reward applies; check `rewards`, and the answers in `data` with lemma data show"
    )


def _long_traces(seen: Seen) -> str | None:
    if seen("off_policy/long_traces") <= 0.5 * seen.options.batch.problems:
        return None
    return (
        f"{seen('off_policy/long_traces'):.0f} of the teacher's traces are longer than {seen.max_tokens} tokens and "
        "were left out; raise `rollout.max_tokens`"
    )


CHECKS: dict[str, Callable[[Seen], str | None]] = {
    "truncation": _truncation,
    "dead groups": _dead,
    "format": _format,
    "missing groups": _missing,
    "entropy": _entropy,
    "noise": _noise,
    "kl": _kl,
    "moved": _moved,
    "ratio": _ratio,
    "mismatch": _mismatch,
    "old samples": _old_samples,
    "not finite": _not_finite,
    "unscored": _unscored,
    "long traces": _long_traces,
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
            self._first_entropy = values.get("entropy/sampled")
        self._recent.append({name: values[name] for name in SHARES if name in values})
        of_steps = {**values, **self._over_recent_steps()}
        seen = Seen(of_steps, self.options, self.max_tokens, self._first_entropy, self.taught_in)
        for name, check in CHECKS.items():
            if name in OF_GROUPS and len(self._recent) < (self._recent.maxlen or 1):
                continue
            text = check(seen)
            if text is not None and step - self._last.get(name, -PAUSE) >= PAUSE:
                self._last[name] = step
                self._warn(f"step {step}: {text}")
        return bottleneck(replace(seen, values=values), spent)

    def _over_recent_steps(self) -> dict[str, float]:
        """The mean of each share over the last steps."""
        means: dict[str, float] = {}
        for name in SHARES:
            known = [step[name] for step in self._recent if name in step]
            if known:
                means[name] = sum(known) / len(known)
        return means

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        extra = {"last": dict(self._last), "first_entropy": self._first_entropy, "recent": list(self._recent)}
        return {}, extra

    def load(self, tensors: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._last, self._first_entropy = dict(extra["last"]), extra["first_entropy"]
        self._recent.extend(extra.get("recent", []))


def _is_stale(seen: Seen) -> bool:
    """Whether the policy has moved too far from its batch. The share of clipped samples is naturally large, that of
    clipped tokens is not; LUFFY does not measure the KL."""
    if seen.options.algorithm.ratio_level == "token" and max(seen("clip/region"), seen("clip/high")) > 0.3:
        return True
    return seen("kl/old") > STALE if "kl/old" in seen.values else seen("ratio/max", 1.0) > 10.0


def bottleneck(seen: Seen, spent: Mapping[str, float]) -> str:
    """The bottleneck in a few words: a part of the step's time, or samples that teach little or nothing."""
    if seen("truncated") > 0.5:
        return "truncation"
    if _taught(seen) < 0.3:
        return "dead groups"
    if _is_stale(seen):
        return "stale ratio"
    return max(PARTS, key=lambda part: spent.get(part, 0.0))
