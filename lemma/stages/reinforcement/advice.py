"""What the warnings of a run say: each names what was seen and the setting that helps.

Settings are written `like.this`, relative to the stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lemma.engines.mismatch import warning_mean
from lemma.evaluation.diagnose import how_to_teach

if TYPE_CHECKING:
    from lemma.stages.reinforcement.diagnosis import Seen


def settings(seen: Seen, *names: str) -> str:
    """Those of these options that the algorithm has, in words; empty if it has none."""
    own = [f"`algorithm.{name}`" for name in names if name in type(seen.options.algorithm).model_fields]
    return " or ".join(own)


def truncation(seen: Seen) -> str:
    return (
        f"{seen('truncated'):.0%} of the completions are cut off at {seen.max_tokens} tokens; raise "
        f"`rollout.max_tokens`, or teach the model to end: {how_to_teach(seen.taught_in)}"
    )


def dead_groups(seen: Seen) -> str:
    if seen("groups/all_right") > 0.8:
        return (
            "nearly every group is right throughout: there is nothing left to learn; choose harder problems in `data`"
        )
    if seen("groups/none_right") > 0.8:
        luffy = "" if seen.options.algorithm.uses_traces else ", or use luffy with a teacher's traces"
        return (
            "nearly no group has a right completion, so rewards do not vary; choose easier problems in `data`, raise "
            f"`algorithm.group_size`, or {how_to_teach(seen.taught_in)}{luffy}"
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


def format_missed(seen: Seen) -> str:
    return (
        f"the format is almost never met; {how_to_teach(seen.taught_in)}, or choose another format, or pay for it in "
        "`rewards`"
    )


def missing_groups(seen: Seen) -> str:
    return (
        f"{seen('missing_groups'):.0f} of {seen.options.batch.problems} groups are missing after "
        f"{seen('rounds'):.0f} rounds; raise `replace_dead`, or choose problems of another difficulty in `data`"
    )


def low_entropy(seen: Seen) -> str:
    """Samples that do not differ teach nothing."""
    raised = settings(seen, "entropy", "clip_high")
    return (
        f"the entropy fell from {seen.first_entropy:.2g} to {seen('entropy/sampled'):.2g}: samples hardly differ; "
        f"lower `optim.lr`{f', or raise {raised}' if raised else ''}"
    )


def noise(seen: Seen) -> str:
    """The optimiser scales any gradient to full steps: if rewards do not vary, the entropy bonus is the only one."""
    bonus = seen.options.algorithm.gives_entropy_bonus
    return (
        f"the entropy rose from {seen.first_entropy:.2g} to {seen('entropy/sampled'):.2g}: the policy forgets its "
        f"language; {'lower `algorithm.entropy`, or ' if bonus else ''}lower `optim.lr`"
    )


def far_from_reference(seen: Seen) -> str:
    raised = settings(seen, "kl", "reward_kl")
    return f"the policy is {seen.kl:.2g} nats a token from the reference; lower `optim.lr` or raise {raised}"


def moved(seen: Seen) -> str:
    return (
        f"the policy is {seen('kl/old'):.2g} nats a token from the one that sampled its batch; lower `optim.lr`, "
        "`algorithm.epochs` or `algorithm.mini_batches`"
    )


def large_ratio(seen: Seen) -> str:
    return (
        f"the largest ratio is {seen('ratio/max'):.2g}; lower `optim.lr`, `algorithm.epochs` or "
        "`algorithm.mini_batches`"
    )


def mismatch(seen: Seen) -> str:
    engine, limit = seen.options.rollout.engine.name, warning_mean(seen("mismatch/rounding"))
    repairs = [f"weigh tokens by it with {cap} (2 is usual)"] if (cap := settings(seen, "mismatch_cap")) else []
    if engine != "transformers":
        repairs.append("set `rollout.engine` to transformers to see whether the engine is at fault")
    return (
        f"the {engine} engine and the learner disagree about the tokens that were sampled: their log-probabilities "
        f"differ by {seen('mismatch/mean'):.2g} on average, and rounding explains {limit:.2g}; "
        f"{', or '.join(repairs) or 'compute in fp32'}"
    )


def old_samples(seen: Seen) -> str:
    name = "rollout.lag_limit" if seen.options.rollout.lag == "flying" else "rollout.lag"
    share = seen("effective_samples")
    return f"samples are {seen('staleness/mean'):.1f} updates old, and {share:.0%} of them are left; lower `{name}`"


def not_finite(seen: Seen) -> str:
    return "the gradient is not finite and nothing was learnt; lower `optim.lr`"


def unscored(seen: Seen) -> str:
    return (
        f"{seen('unscored'):.0f} of {seen('samples'):.0f} completions have no reward: their verdict is unknown "
        "or no reward applies; check `rewards`, and the answers in `data` with lemma data show"
    )


def long_traces(seen: Seen) -> str:
    return (
        f"{seen('off_policy/long_traces'):.0f} of the teacher's traces are longer than {seen.max_tokens} tokens and "
        "were left out; raise `rollout.max_tokens`"
    )
