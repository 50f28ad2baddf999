"""LUFFY: a teacher's traces enter the group beside the policy's own samples (arXiv 2504.14945).

The traces are rewarded and compared like samples. Their tokens have no ratio to an old policy; their probability,
reshaped so that unlikely tokens are learnt too, takes its place, and nothing clips it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.algorithm import K1_IN_LOSS, Algorithm, KlEstimator, Memory, rewards_of
from lemma.algorithms.prefixes import PrefixOptions
from lemma.algorithms.unused import refuse_unused
from lemma.config import Options
from lemma.core.errors import UserError
from lemma.core.types import Group, Trajectory

if TYPE_CHECKING:
    from lemma.objectives.controllers import LearnedEntropy
    from lemma.objectives.mixed import MixedPolicyLoss
    from lemma.objectives.shaping import Shape

Reshape = Literal["no_reshape", "logp", "p_logp", "square_root", "pow", "p_div_p"]


class ReshapeOptions(Options):
    """How the ratio or the probability p of a token becomes its weight in the loss."""

    reshape: Reshape = "no_reshape"
    """`no_reshape`: as it is. `logp`: its logarithm. `p_logp`: itself plus `weight` times its logarithm. `square_root`.
    `pow`: to the power of `power`. `p_div_p`: p / (p + gamma)."""
    weight: float = 0.1
    """Weight of the logarithm in p_logp, and for a teacher's tokens in logp."""
    power: float = Field(0.5, gt=0)
    """Exponent of pow."""
    gamma: float = Field(0.1, gt=0)
    """The gamma of p_div_p: tokens about this likely pull most."""
    factor: float = 1.0
    """Factor of the advantages of these tokens."""

    constants: ClassVar[dict[str, tuple[Reshape, ...]]] = {
        "weight": ("p_logp",),
        "power": ("pow",),
        "gamma": ("p_div_p",),
    }
    """The reshapings that each constant is of."""

    @model_validator(mode="after")
    def _constants_of_the_reshape(self) -> Self:
        for name, users in self.constants.items():
            if self.reshape not in users:
                refuse_unused(self, (name,), f"with `reshape: {self.reshape}`", f"write `reshape: {users[0]}`")
        return self

    def shape(self) -> Shape:
        from lemma.objectives.shaping import Shape

        return Shape(self.reshape, self.weight, self.power, self.gamma)


class OffPolicyOptions(ReshapeOptions):
    """A teacher's tokens."""

    reshape: Reshape = "p_div_p"
    """How the probability p of a token becomes its weight; see on_policy.reshape. Of `logp`, `weight` times it."""
    behaviour: Literal["one", "given"] = "one"
    """How likely the teacher's tokens were to the teacher: counted as 1, or as the data give it for each token
    (`trace_probs` of a problem), which leaves `reshape` without use."""
    min: float | None = None
    """Smallest weight of a token."""
    max: float | None = None
    """Largest weight of a token."""

    constants: ClassVar[dict[str, tuple[Reshape, ...]]] = ReshapeOptions.constants | {"weight": ("p_logp", "logp")}

    @model_validator(mode="after")
    def _works_together(self) -> Self:
        if self.behaviour == "given":
            refuse_unused(self, ("reshape", *self.constants), "with `behaviour: given`", "write `behaviour: one`")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; lower min")
        return self


class AdaptiveEntropyOptions(Options):
    """A weight of the entropy bonus that holds the entropy near a target."""

    kind: Literal["learned", "proportional"] = "learned"
    """`learned`: the weight is trained once a step, on the mean entropy of its updates. `proportional`: entropy x
    target / mean entropy of the batch, which takes a second pass over the batch."""
    target: float = Field(1.0, gt=0)
    """Entropy in nats per token to hold."""
    limit: float | None = Field(None, gt=0)
    """Largest weight (learned only)."""
    lr: float = Field(1e-2, gt=0)
    """Learning rate of the logarithm of the weight (learned only)."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if self.kind == "proportional":
            refuse_unused(self, ("limit", "lr"), "with `kind: proportional`", "write `kind: learned`")
        return self


class Luffy(Algorithm):
    """Off-policy guidance: samples of a teacher in every group, weighted by how likely the policy finds them."""

    name: Literal["luffy"] = "luffy"
    """Off-policy guidance by a teacher's traces."""
    prefix: PrefixOptions = PrefixOptions()
    """Which samples begin with a teacher's trace."""
    on_policy: ReshapeOptions = ReshapeOptions()
    """The policy's own tokens: how their ratio of the new to the old policy is reshaped."""
    off_policy: OffPolicyOptions = OffPolicyOptions()
    """A teacher's tokens."""
    statistics: Literal["group", "on_policy"] = "group"
    """Whose rewards make the baseline: those of the whole group, or of the policy's own samples."""
    scale: Literal["none", "group"] = "none"
    """Divide advantages by the standard deviation of the rewards that make the baseline."""
    clip: float | None = Field(None, gt=0, lt=1)
    """Of the policy's own tokens the ratio counts down to 1 - clip and up to 1 + clip; null: without an end."""
    clip_high: float | None = Field(None, gt=0)
    """Another distance upwards. Default: the same as clip."""
    normalise: Literal["token", "sequence", "constant"] = "constant"
    """The loss is a mean over tokens, a mean over samples of the means over their tokens, or a mean over samples of
    sums divided by `constant`."""
    constant: float | None = Field(None, gt=0)
    """Divisor for `normalise: constant`. Default: the longest response."""
    skip_above: float | None = Field(None, gt=0, le=1)
    """Leave out tokens that the policy finds more likely than this."""
    sft_weight: float | None = Field(None, gt=0)
    """Imitate a teacher's samples (negative log-likelihood with this weight) instead of weighing them: the baseline
    "RL with SFT loss". It is divided like the rest of the loss."""
    prefix_reward: float | None = None
    """Advantage of a teacher's tokens, divided by group_size, whatever became of the sample. Needs
    `prefix: {samples: -1}`."""
    entropy: float = Field(0.001, ge=0)
    """Weight of the entropy bonus, a mean over all tokens. The paper says 0.01, its scripts 0.001."""
    adaptive_entropy: AdaptiveEntropyOptions | None = None
    """Let the weight of the entropy follow the entropy."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL to the starting model; 0 needs no reference."""
    kl_estimator: KlEstimator = "low_var_kl"
    """How the KL is estimated."""
    ratio_kl: float = Field(0.0, ge=0)
    """Weight of the size of the mean log-ratio of old and new policy; takes a second pass over the batch."""
    mismatch_cap: float | None = Field(None, gt=0)
    """Weigh the policy's own tokens by old / behaviour probability, at most this much."""
    compat: bool = False
    """The original's literal scale: sums and means over each micro-batch, so that the loss depends on the packing."""

    @model_validator(mode="after")
    def _works_together(self) -> Self:
        if self.group_size == 1 and not self._learns_without_advantages:
            raise ValueError("luffy compares the samples of a problem, and with `group_size: 1` every advantage is 0; "
                             "write for example `group_size: 8`")  # fmt: skip
        taught = self.prefix.count(self.group_size)
        if taught > self.group_size:
            raise ValueError(f"prefix.samples {taught} is above group_size {self.group_size}; write -1 for all samples")
        if taught == self.group_size and self.prefix.least == 1 and not self._learns_without_advantages:
            raise ValueError(
                "samples that are all the same whole trace have the same reward, and every advantage is 0; "
                "write `prefix: {samples: 1}`, or a prefix.min below 1"
            )
        if self.statistics == "on_policy" and taught == self.group_size and self.prefix.least > 0:
            raise ValueError("there is no sample of the policy's own to make a baseline of; write `statistics: group`")
        if self.sft_weight is not None and not taught:
            raise ValueError("sft_weight needs a teacher's samples; write `prefix: {samples: 1}`")
        if self.prefix_reward is not None and (self.prefix.samples != -1 or self.sft_weight is not None):
            raise ValueError("prefix_reward is for groups that a teacher begins throughout; write "
                             "`prefix: {samples: -1}` and no sft_weight")  # fmt: skip
        if self.constant is not None and self.normalise != "constant":
            raise ValueError("constant is used by `normalise: constant` only; write that, or remove constant")
        if self.clip_high is not None and self.clip is None:
            raise ValueError("clip_high needs clip; write for example `clip: 0.2`, or remove it")
        if self.clip is not None and self.on_policy.reshape == "logp":
            raise ValueError("clip is of a ratio near 1, and `on_policy: {reshape: logp}` is near 0; remove clip, or "
                             "reshape otherwise")  # fmt: skip
        if self.kl and self.kl_estimator == "k1":
            raise ValueError(K1_IN_LOSS)
        if self.adaptive_entropy is not None and not self.entropy:
            raise ValueError("an adaptive entropy starts from a weight above 0; add `entropy: 0.001`")
        if self.compat and self.normalise == "sequence":
            raise ValueError("the original has no normalisation by sequence; write `normalise: constant`")
        return self

    @model_validator(mode="after")
    def _all_is_used(self) -> Self:
        if not self.uses_traces:
            names = ("off_policy", "statistics")
            refuse_unused(self, names, "with `prefix: {samples: 0}`", "write `prefix: {samples: 1}`")
        if self.sft_weight is not None:
            refuse_unused(self, ("off_policy",), "with sft_weight, which imitates a teacher's samples",
                          "remove sft_weight")  # fmt: skip
        if not self.kl:
            refuse_unused(self, ("kl_estimator",), "with `kl: 0`", "write for example `kl: 0.001`")
        return self

    # --- what the loop asks ------------------------------------------------------------------------------------

    @property
    def uses_traces(self) -> bool:
        return self.prefix.samples != 0

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0

    @property
    def needs_dead_groups(self) -> bool:
        return bool(self.entropy or self.kl or self.ratio_kl or self.sft_weight)

    def prefix_lengths(self, trace_tokens: int, *, seed: int, step: int, problem_id: str) -> list[int]:
        return self.prefix.lengths(trace_tokens, self.group_size, seed=seed, step=step - 1, problem_id=problem_id)

    def assign(self, groups: Sequence[Group], memory: Memory) -> None:
        for group in groups:
            for trajectory, advantage in zip(group.trajectories, self._advantages(group), strict=True):
                trajectory.token_fields["advantage"] = self._of_tokens(trajectory, advantage)
                if self.off_policy.behaviour == "given":
                    trajectory.token_fields["target_prob"] = _target_probs(group, trajectory)

    def is_live(self, group: Group) -> bool:
        if self.sft_weight is not None and any(_off(t)[t.chosen_T].any() for t in group.trajectories):
            return True
        found = zip(group.trajectories, self._advantages(group), strict=True)
        return any(self._of_tokens(trajectory, advantage)[trajectory.chosen_T].any() for trajectory, advantage in found)

    def objective(self, max_tokens: int, memory: Memory) -> MixedPolicyLoss:
        from lemma.objectives.mixed import Compat, MixedPolicyLoss
        from lemma.objectives.policy_loss import KlTerm
        from lemma.objectives.policy_mismatch import MismatchWeight
        from lemma.objectives.policy_surrogates import Clip, Unclipped

        adaptive = self.adaptive_entropy
        learned = self._learned(memory)
        off = self.off_policy
        return MixedPolicyLoss(
            surrogate=Unclipped() if self.clip is None else Clip.around(self.clip, self.clip_high),
            normalise=self.normalise,
            constant=self.constant or float(max_tokens),
            on_shape=self.on_policy.shape(),
            off_shape=off.shape(),
            off_min=off.min,
            off_max=off.max,
            skip_above=self.skip_above,
            sft=self.sft_weight,
            entropy=self.entropy if learned is None else learned.coefficient,
            entropy_target=adaptive.target if adaptive is not None and learned is None else None,
            kl=KlTerm(self.kl, self.kl_estimator) if self.kl else None,
            ratio_kl=self.ratio_kl,
            mismatch=None if self.mismatch_cap is None else MismatchWeight(cap=self.mismatch_cap),
            compat=Compat() if self.compat else None,
            name=self.name,
        )

    def observe(self, metrics: Mapping[str, float], memory: Memory) -> None:
        learned = self._learned(memory)
        if learned is not None and "entropy" in metrics:
            learned.update(metrics["entropy"])
            memory.inner |= {f"entropy/{name}": value for name, value in learned.state().items()}
            memory.numbers["entropy_weight"] = learned.coefficient

    # --- pieces ------------------------------------------------------------------------------------------------

    @property
    def _learns_without_advantages(self) -> bool:
        """Whether a teacher's tokens are learnt whatever the rewards of their group are."""
        return self.sft_weight is not None or self.prefix_reward is not None

    def _advantages(self, group: Group) -> np.ndarray:
        from lemma.objectives.luffy_advantages import mixed_advantages

        same = np.zeros(len(group.trajectories))
        return mixed_advantages(
            rewards_of(group), same, _taught(group), statistics=self.statistics, use_std=self.scale == "group"
        )

    def _of_tokens(self, trajectory: Trajectory, advantage: float) -> np.ndarray:
        from lemma.objectives.luffy_advantages import weighted_by_origin, with_prefix_reward

        off_T = _off(trajectory)
        found = weighted_by_origin(
            np.full(len(trajectory), advantage), off_T, off=self.off_policy.factor, on=self.on_policy.factor
        )
        if self.prefix_reward is None:
            return found
        return with_prefix_reward(found, off_T, weight=self.prefix_reward, group_size=self.group_size)

    def _learned(self, memory: Memory) -> LearnedEntropy | None:
        options = self.adaptive_entropy
        if options is None or options.kind != "learned":
            return None
        from lemma.objectives.controllers import LearnedEntropy

        control = LearnedEntropy(self.entropy, target=options.target, limit=options.limit, lr=options.lr)
        kept = {name[8:]: value for name, value in memory.inner.items() if name.startswith("entropy/")}
        if kept:
            control.load(kept)
        return control


def _off(trajectory: Trajectory) -> np.ndarray:
    """1 where a token comes from a teacher."""
    return trajectory.token_fields.get("off", np.zeros(len(trajectory)))


def _taught(group: Group) -> np.ndarray:
    """Which samples a teacher began, also of those whose tokens are masked."""
    return np.array([bool(_off(t).any()) for t in group.trajectories], dtype=bool)


def _target_probs(group: Group, trajectory: Trajectory) -> np.ndarray:
    """The teacher's own probability of each of its tokens; 1 elsewhere, and for the end that was added to a trace."""
    places = np.flatnonzero(_off(trajectory))
    given: Any = group.problem.extra.get("trace_probs")
    if len(places) and given is None:
        raise UserError(
            f"problem {group.problem.id} has no trace_probs, the teacher's probability of each token of its trace",
            fix="write `off_policy: {behaviour: one}`",
        )
    probs = np.ones(len(trajectory))
    known = np.asarray(given if len(places) else [], dtype=np.float64)[: len(places)]
    if len(places) - len(known) > 1:
        raise UserError(
            f"problem {group.problem.id} has {len(known)} trace_probs for {len(places)} tokens of its trace",
            fix="give one for each token of this tokenizer, or write `off_policy: {behaviour: one}`",
        )
    probs[places[: len(known)]] = known
    return probs
