"""The options of LUFFY, and what they require of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lemma.algorithms.algorithm import Algorithm, AlgorithmState
from lemma.algorithms.parts import loss_options as shared
from lemma.algorithms.parts.prefixes import PrefixOptions
from lemma.config import Options
from lemma.config.options import refuse_moved, refuse_unused

if TYPE_CHECKING:
    from lemma.objectives.controllers import LearnedEntropy
    from lemma.objectives.shaping import Shaping

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
    """The gamma of p_div_p: tokens with about this probability get the largest gradient."""
    factor: float = 1.0
    """Multiplies the advantages of these tokens."""

    constants: ClassVar[dict[str, tuple[Reshape, ...]]] = {
        "weight": ("p_logp",),
        "power": ("pow",),
        "gamma": ("p_div_p",),
    }
    """The reshapings that use each constant."""

    @model_validator(mode="after")
    def _constants_of_the_reshape(self) -> Self:
        for name, users in self.constants.items():
            if self.reshape not in users:
                refuse_unused(self, (name,), f"with `reshape: {self.reshape}`", f"write `reshape: {users[0]}`")
        return self

    def shape(self) -> Shaping:
        from lemma.objectives.shaping import Shaping

        return Shaping(self.reshape, self.weight, self.power, self.gamma)


class OffPolicyOptions(ReshapeOptions):
    """The weight of a teacher's tokens."""

    reshape: Reshape = "p_div_p"
    """How the probability p of a token becomes its weight. `no_reshape`: p. `logp`: `weight` times its logarithm.
    `p_logp`: p plus `weight` times its logarithm. `square_root`. `pow`: p to the power of `power`. `p_div_p`:
    p / (p + gamma)."""
    behaviour: Literal["one", "given"] = "one"
    """Probability of the teacher's tokens under the teacher: taken as 1, or given by the data for each token
    (`trace_probs` of a problem), in which case `reshape` has no effect."""
    min: float | None = None
    """Minimum weight of a token."""
    max: float | None = None
    """Maximum weight of a token."""

    constants: ClassVar[dict[str, tuple[Reshape, ...]]] = ReshapeOptions.constants | {"weight": ("p_logp", "logp")}

    @model_validator(mode="after")
    def _works_together(self) -> Self:
        if self.behaviour == "given":
            refuse_unused(self, ("reshape", *self.constants), "with `behaviour: given`", "write `behaviour: one`")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; lower min")
        return self


class AdaptiveEntropyOptions(Options):
    """A weight of the entropy bonus that adapts to keep the entropy near a target."""

    kind: Literal["learned", "proportional"] = "learned"
    """`learned`: the weight is trained once per step, on the mean entropy of the step's updates. `proportional`:
    entropy x target / mean entropy of the batch, which takes a second pass over the batch."""
    target: float = Field(1.0, gt=0)
    """Target entropy, in nats per token."""
    limit: float | None = Field(None, gt=0)
    """Maximum weight (learned only)."""
    lr: float = Field(1e-2, gt=0)
    """Learning rate of the logarithm of the weight (learned only)."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if self.kind == "proportional":
            refuse_unused(self, ("limit", "lr"), "with `kind: proportional`", "write `kind: learned`")
        return self

    def learned(self, start: float, memory: AlgorithmState) -> LearnedEntropy | None:
        """The controller with its remembered state, if the weight is learned; otherwise None."""
        if self.kind != "learned":
            return None
        from lemma.objectives.controllers import LearnedEntropy

        control = LearnedEntropy(start, target=self.target, limit=self.limit, lr=self.lr)
        kept = {name[8:]: value for name, value in memory.inner.items() if name.startswith("entropy/")}
        if kept:
            control.load(kept)
        return control


class LuffyCompat(Options):
    """Options of the original code that its published runs do not use."""

    micro_batch_scale: bool = False
    """Normalise exactly as the original does: sums and means per micro-batch, so the loss depends on the packing."""
    on_policy: ReshapeOptions = Field(default_factory=ReshapeOptions)
    """The policy's own tokens: how the ratio of the new to the old policy is reshaped."""
    skip_above: float | None = Field(None, gt=0, le=1)
    """Mask tokens whose probability under the policy is above this."""
    prefix_reward: float | None = None
    """Advantage of a teacher's tokens, divided by group_size, whatever reward the sample got. Needs
    `prefix: {samples: -1}`."""
    ratio_kl: float = Field(0.0, ge=0)
    """Weight of the absolute mean log-ratio of old and new policy; takes a second pass over the batch."""
    adaptive_entropy: AdaptiveEntropyOptions | None = None
    """Adapt the weight of the entropy bonus to the measured entropy."""

    def of_loss(self, entropy: float, memory: AlgorithmState) -> dict[str, Any]:
        """The arguments that these options give the loss; `entropy` is the weight that an adaptive one starts from."""
        from lemma.objectives.mixed import Compat

        adaptive, learned = self.adaptive_entropy, self._learned(entropy, memory)
        return {
            "on_shape": self.on_policy.shape(),
            "skip_above": self.skip_above,
            "entropy": entropy if learned is None else learned.coefficient,
            "entropy_target": adaptive.target if adaptive is not None and learned is None else None,
            "ratio_kl": self.ratio_kl,
            "compat": Compat() if self.micro_batch_scale else None,
        }

    def observe(self, entropy: float, metrics: Mapping[str, float], memory: AlgorithmState) -> None:
        """Train the weight of the entropy bonus, if it is learned."""
        learned = self._learned(entropy, memory)
        if learned is not None and "entropy" in metrics:
            learned.update(metrics["entropy"])
            memory.inner |= {f"entropy/{name}": value for name, value in learned.state().items()}
            memory.numbers["entropy_weight"] = learned.coefficient

    def _learned(self, entropy: float, memory: AlgorithmState) -> LearnedEntropy | None:
        return None if self.adaptive_entropy is None else self.adaptive_entropy.learned(entropy, memory)


LUFFY_MOVED = {name: f"compat.{name}" for name in LuffyCompat.model_fields}


class LuffyOptions(Algorithm):
    """Which samples begin with a teacher's trace, how its tokens are weighted, and what else is in the loss."""

    prefix: PrefixOptions = Field(default_factory=PrefixOptions)
    """Which samples begin with a teacher's trace."""
    off_policy: OffPolicyOptions = Field(default_factory=OffPolicyOptions)
    """The weight of a teacher's tokens."""
    statistics: Literal["group", "on_policy"] = "group"
    """Whose rewards form the baseline: the whole group's, or those of the policy's own samples."""
    scale: Literal["none", "group"] = "none"
    """Divide advantages by the standard deviation of the rewards that form the baseline."""
    clip: shared.Clip = None
    clip_high: shared.ClipHigh = None
    normalise: shared.Normalise = "constant"
    constant: shared.Constant = None
    sft_weight: float | None = Field(None, gt=0)
    """Imitate a teacher's samples (negative log-likelihood with this weight) instead of weighting them: the baseline
    "RL with SFT loss". Normalised like the rest of the loss."""
    entropy: shared.EntropyWeight = 0.001
    kl: shared.KlWeight = 0.0
    kl_estimator: shared.KlEstimator = "low_var_kl"
    mismatch_cap: shared.MismatchCap = None
    compat: LuffyCompat = Field(default_factory=LuffyCompat)
    """Options of the original code that its published runs do not use."""

    @model_validator(mode="before")
    @classmethod
    def _moved(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("compat"), bool):
            raise ValueError("compat is a block now; write `compat: {micro_batch_scale: true}`, or remove compat")
        return refuse_moved(values, LUFFY_MOVED)

    @model_validator(mode="after")
    def _groups_teach(self) -> Self:
        if not self._learns_without_advantages:
            shared.check_compared("luffy", self.group_size)
        taught = self.prefix.count(self.group_size)
        if taught > self.group_size:
            raise ValueError(f"prefix.samples {taught} is above group_size {self.group_size}; write -1 for all samples")
        if taught == self.group_size and self.prefix.least == 1 and not self._learns_without_advantages:
            raise ValueError(
                "samples that are all the whole trace have the same reward, and every advantage is 0; "
                "write `prefix: {samples: 1}`, or a prefix.min below 1"
            )
        if self.statistics == "on_policy" and taught == self.group_size and self.prefix.least > 0:
            raise ValueError("no sample of the policy's own is left to form a baseline; write `statistics: group`")
        if self.sft_weight is not None and not taught:
            raise ValueError("sft_weight needs a teacher's samples; write `prefix: {samples: 1}`")
        if self.compat.prefix_reward is not None and (self.prefix.samples != -1 or self.sft_weight is not None):
            raise ValueError(
                "compat.prefix_reward needs groups in which every sample begins with the trace; "
                "write `prefix: {samples: -1}` and no sft_weight"
            )
        return self

    @model_validator(mode="after")
    def _loss_fits(self) -> Self:
        shared.check_divisor(self.normalise, self.constant)
        shared.check_kl_in_loss(self.kl, self.kl_estimator)
        if self.clip_high is not None and self.clip is None:
            raise ValueError("clip_high needs clip; write for example `clip: 0.2`, or remove it")
        if self.clip is not None and self.compat.on_policy.reshape == "logp":
            raise ValueError(
                "clip is for a ratio near 1, and `on_policy: {reshape: logp}` is near 0; remove clip, or reshape "
                "otherwise"
            )
        if self.compat.adaptive_entropy is not None and not self.entropy:
            raise ValueError("an adaptive entropy starts from a weight above 0; add `entropy: 0.001`")
        if self.compat.micro_batch_scale and self.normalise == "sequence":
            raise ValueError("the original has no normalisation by sequence; write `normalise: constant`")
        return self

    @model_validator(mode="after")
    def _all_is_used(self) -> Self:
        if not self.uses_traces:
            names = ("off_policy", "statistics")
            refuse_unused(self, names, "with `prefix: {samples: 0}`", "write `prefix: {samples: 1}`")
        if self.sft_weight is not None:
            where = "with sft_weight, which imitates a teacher's samples"
            refuse_unused(self, ("off_policy",), where, "remove sft_weight")
        if not self.kl:
            refuse_unused(self, ("kl_estimator",), "with `kl: 0`", "write for example `kl: 0.001`")
        return self

    @property
    def _learns_without_advantages(self) -> bool:
        """Whether a teacher's tokens are trained on whatever the rewards of their group."""
        return self.sft_weight is not None or self.compat.prefix_reward is not None

    @property
    def uses_traces(self) -> bool:
        return self.prefix.samples != 0

    @property
    def parts_traces(self) -> bool:
        return self.uses_traces and self.prefix.least < 1

    @property
    def needs_trace_probs(self) -> bool:
        return self.off_policy.behaviour == "given"

    @property
    def compares_traces(self) -> bool:
        return self.sft_weight is None

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0

    @property
    def gives_entropy_bonus(self) -> bool:
        return self.entropy > 0

    @property
    def needs_all_groups(self) -> bool:
        return bool(self.entropy or self.kl or self.compat.ratio_kl or self.sft_weight)

    def prefix_lengths(self, trace_tokens: int, *, seed: int, step: int, problem_id: str) -> list[int]:
        return self.prefix.lengths(trace_tokens, self.group_size, seed=seed, step=step - 1, problem_id=problem_id)
