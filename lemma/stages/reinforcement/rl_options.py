"""What a recipe can say about the reinforcement stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from lemma.algorithms import ALGORITHMS, Algorithm
from lemma.algorithms.grpo import Grpo
from lemma.config import Options
from lemma.config.shape import Choice
from lemma.core.errors import nearest
from lemma.data.data_options import DataOptions, ValidationOptions
from lemma.engines.engine_options import ENGINES, EngineOptions, NativeOptions
from lemma.environments import ENVIRONMENTS, EnvironmentOptions, SingleTurn
from lemma.environments import as_options as environment_options
from lemma.learning.learning_options import BudgetOptions, check_rate
from lemma.rewards import REWARDS, Reward
from lemma.rewards import as_options as reward_options
from lemma.rewards.combine import labels
from lemma.runs.run_options import BOTH_LENGTHS, StageOptions
from lemma.stages.reference_options import ReferenceModelOptions

if TYPE_CHECKING:
    from lemma.formats import Format
    from lemma.runs.stage import Stage

# Far above what anybody trains on: more is a slip of the keyboard.
MOST_SAMPLES, MOST_TOKENS = 10**6, 10**8


def _accuracy() -> list[Reward]:
    return [REWARDS["accuracy"]()]


class RolloutOptions(Options):
    """How completions are sampled."""

    engine: Annotated[EngineOptions, Choice(ENGINES, by="name")] = Field(default_factory=NativeOptions)
    """Which engine generates: native, vllm or transformers; a name, or a mapping with name and options."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the learner computes its log-probabilities at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the likeliest tokens that make up this probability mass."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest tokens; 0 means all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop tokens whose probability is below this share of the likeliest token's."""
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Maximum number of tokens in a response. Default: what the longest prompt leaves of the model's context."""
    min_tokens: int = Field(0, ge=0)
    """No response ends before this many tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings after which a response ends, in addition to those of the format and the end-of-turn tokens."""
    lag: Annotated[int, Field(ge=0, le=64)] | Literal["flying"] = 0
    """Sample all of step t with the weights after step t - 1 - lag. With generation servers, later steps are then
    sampled while the learner works. Tokens get importance weights old / behaviour, capped at `lag_cap`. With `flying`,
    responses continue across updates, and their later tokens come from the new weights."""
    lag_limit: int = Field(2, ge=1, le=64)
    """With `lag: flying`: how many steps ahead of the learner responses may begin, and so how many updates old a token
    may be when it is trained on."""
    lag_cap: float | None = Field(2.0, gt=0)
    """The cap on those weights, unless the algorithm sets its own `mismatch_cap`; null: no weights. Only with lag."""
    repetition_penalty: float = 1.0
    """For inference only: a training recipe leaves it at 1, because the policy being trained must be the one that
    sampled."""

    @model_validator(mode="after")
    def _plain(self) -> RolloutOptions:
        if self.repetition_penalty != 1.0:
            raise ValueError("a repetition penalty is for inference only; leave repetition_penalty out of rollout")
        return self


class RlBatchOptions(BudgetOptions):
    """How much is sampled for one step, and how much is computed at a time."""

    problems: int = Field(32, ge=1)
    """Problems per step, each with `algorithm.group_size` samples."""


class KeptJournalOptions(Options):
    """Which samples stay on disk."""

    keep: Annotated[int, Field(ge=1)] | Literal["all"] = "all"
    """Keep the samples of this many of the newest steps; `lemma plan` says how much space they take. Samples since the
    last checkpoint always stay. A later stage with `source: journal` finds whatever is left."""

    notes: bool = True
    """Also keep each token's advantage and ratios from the updates, so that `lemma report` can colour by them: for the
    same steps, at most 4 bytes per token."""

    @property
    def steps(self) -> int | None:
        return None if self.keep == "all" else self.keep


class ReinforcementOptions(StageOptions):
    """Learn from the policy's own samples: generate groups, grade them, and reinforce the better samples of each
    group."""

    kind: Literal["rl"] = "rl"
    """Reinforcement learning."""
    algorithm: Annotated[Algorithm, Choice(ALGORITHMS, by="name")] = Field(default_factory=Grpo)
    """The algorithm: a name, or a mapping with name and options."""
    data: DataOptions = DataOptions()
    """Where the problems come from."""
    validation: ValidationOptions = ValidationOptions()
    """Held-out problems, evaluated like a benchmark called `validation`: at the start, every `every` steps, and at the
    end."""
    rewards: list[Annotated[Reward, Choice(REWARDS, by="name", as_options=reward_options)]] = Field(
        default_factory=_accuracy, min_length=1
    )
    """What completions are worth: names, mappings with name and options, or `path.py:Name`, a class or a function."""
    environment: Annotated[EnvironmentOptions, Choice(ENVIRONMENTS, by="name", as_options=environment_options)] = Field(
        default_factory=SingleTurn
    )
    """What replies between the turns of an episode: a name, or a mapping with name and options. Default: nothing, so a
    problem gets one response. The environment's own score is the reward `environment`, and gives the verdict."""
    rollout: RolloutOptions = Field(default_factory=RolloutOptions)
    """How completions are sampled; limits are per turn."""
    batch: RlBatchOptions = RlBatchOptions()
    """Batch sizes."""
    journal: KeptJournalOptions = KeptJournalOptions()
    """The journal: all samples of a step, written to disk before they are trained on and compressed afterwards."""
    reference_model: ReferenceModelOptions | None = None
    """Another reference for the algorithm's KL penalty than the model that the stage starts from, or one that follows
    the policy."""
    steps: int | None = Field(None, ge=1)
    """Number of rollout batches. Give this or epochs; default one epoch."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the problems; problems that replace dead groups are drawn in addition."""
    truncated: Literal["keep", "mask"] = "keep"
    """What to do with responses cut off at max_tokens: train on them like any other, or count them only in their
    group's statistics. To penalise length, add the reward soft_overlong."""
    replace_dead: int | None = Field(None, ge=0)
    """Maximum number of further rounds of generation in which groups whose rewards do not differ are replaced with
    other problems. Default: the algorithm's own, which is 0 except for dapo."""

    @model_validator(mode="after")
    def _one_engine(self) -> ReinforcementOptions:
        if self.eval.engine != NativeOptions():
            raise ValueError(
                "a stage that samples evaluates with its own engine; write `rollout.engine`, not eval.engine"
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> ReinforcementOptions:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(BOTH_LENGTHS)
        check_rate("algorithm.value_lr", self.algorithm.critic_lr or 0.0)
        if self.data.streaming:
            raise ValueError("`data.streaming` is for supervised stages: problems stay in memory; remove it")
        if self.rollout.max_tokens is not None and self.rollout.min_tokens > self.rollout.max_tokens:
            raise ValueError("rollout.min_tokens is above rollout.max_tokens; lower it")
        if self.batch.problems * self.algorithm.group_size > MOST_SAMPLES:
            raise ValueError(
                f"a step of {self.batch.problems:,} problems with {self.algorithm.group_size:,} samples each is more "
                f"than any run takes: {MOST_SAMPLES:,} samples or fewer"
            )
        if self.algorithm.mini_batches > self.batch.problems:
            raise ValueError(
                f"{self.batch.problems} problems cannot be dealt out to {self.algorithm.mini_batches} mini-batches; "
                "lower algorithm.mini_batches"
            )
        if self.replace_dead and self.algorithm.needs_critic:
            raise ValueError(
                f"{self.algorithm.name} learns from groups whose rewards do not differ as well: "
                "there are no dead ones to replace; leave replace_dead out"
            )
        needs_truncated = self.algorithm.needs_truncated
        if self.truncated == "mask" and needs_truncated:
            raise ValueError(
                f"algorithm.{needs_truncated} needs the samples that `truncated: mask` leaves out; "
                f"write `truncated: keep`, or remove {needs_truncated}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _environments_reward(cls, given: Any) -> Any:
        """The environment's own reward is the default in an environment."""
        if not isinstance(given, Mapping) or "rewards" in given:
            return given
        chosen = given.get("environment")
        name = chosen.get("name") if isinstance(chosen, Mapping) else getattr(chosen, "name", chosen)
        environment = ENVIRONMENTS.with_lemma(name) if isinstance(name, str) else None
        is_graded = environment is not None and environment.is_graded
        return given if name in (None, "single_turn") or is_graded else {**given, "rewards": ["environment"]}

    @model_validator(mode="after")
    def _environment_fits(self) -> ReinforcementOptions:
        if self.environment.is_single_turn:
            if any(reward.name == "environment" for reward in self.rewards):
                raise ValueError("the reward environment needs one; write for example `environment: higher_lower`")
        elif self.algorithm.parts_traces:
            raise ValueError("in an environment a teacher's episode is whole; remove min, max and strategy of prefix")
        elif self.rollout.max_tokens is None:
            raise ValueError("an episode needs a limit on each of its turns; write `rollout: {max_tokens: 256}`")
        return self

    @model_validator(mode="after")
    def _may_fly(self) -> ReinforcementOptions:
        engine = self.rollout.engine
        if self.rollout.lag != "flying":
            return self
        if not self.environment.is_stepped:
            raise ValueError(
                "an agent does not wait for an update, so its responses cannot continue across one; write `lag: 1`"
            )
        if self.environment.schedule == "exact":
            raise ValueError("`lag: flying` has no exact schedule; remove environment.schedule, or write `lag: 1`")
        if not isinstance(engine, NativeOptions) and not engine.has_own_devices:
            raise ValueError(
                f"responses of the engine {engine.name} cannot continue after an update; write `engine: native`, vLLM "
                "with `mode: server`, or `lag: 1`"
            )
        return self

    @model_validator(mode="after")
    def _rewards_exist(self) -> ReinforcementOptions:
        known = labels(self.rewards)
        weights = self.algorithm.reward_weights
        for name in weights:
            if name not in known:
                raise ValueError(
                    f"algorithm.each_reward names '{name}', which is not in rewards; {nearest(name, known)}"
                )
        for name, reward in zip(known, self.rewards, strict=True):
            if weights and name not in weights:
                raise ValueError(
                    f"algorithm.each_reward leaves out '{name}', which is in rewards; add `{name}: 1` to each_reward, "
                    "or 0 to log it only"
                )
            if weights and reward.weight != 1:
                raise ValueError(
                    f"algorithm.each_reward has the weight of '{name}', and the one in rewards has no effect; "
                    f"write `{name}: {reward.weight:g}` in each_reward and remove weight"
                )
        return self

    @model_validator(mode="after")
    def _length_costs_something(self) -> ReinforcementOptions:
        longest = None if self.rollout.max_tokens is None else self.rollout.max_tokens * self.environment.turns
        for reward in self.rewards:
            if reward.begins is not None and longest is not None and reward.begins >= longest:
                raise ValueError(
                    f"{reward.name} begins after {reward.begins} tokens, which no response has; "
                    f"give it `max_tokens: {longest}` and perhaps a `margin`"
                )
        return self

    @model_validator(mode="after")
    def _reference_is_asked(self) -> ReinforcementOptions:
        if self.reference_model is not None and not self.algorithm.needs_reference:
            raise ValueError("nothing asks the reference; write `kl: 0.001` or more under algorithm, or remove it")
        return self

    def missing(self, *, has_adapter: bool, has_samples: bool) -> tuple[tuple[str, ...], str]:
        """The key and the error for something that the recipe lacks; empty if nothing is missing."""
        wrong = self.reference_model.missing(has_adapter=has_adapter) if self.reference_model is not None else ""
        return (("reference_model",), wrong) if wrong else ((), "")

    @property
    def native_servers(self) -> int:
        engine = self.rollout.engine
        return engine.server_count if isinstance(engine, NativeOptions) and engine.servers else 0

    @property
    def slot_servers(self) -> int:
        """Responses in flight are given to the servers one by one, not by slots."""
        return 0 if self.rollout.lag == "flying" else self.native_servers

    def models_beside(self, *, has_adapter: bool) -> dict[str, bool]:
        """A policy with adapters is its own reference with the adapters off, unless there is another one."""
        is_second = self.reference_model is not None or not has_adapter
        return {"critic": self.algorithm.needs_critic, "reference": self.algorithm.needs_reference and is_second}

    @property
    def rounds(self) -> int:
        """Further rounds of generation that replace dead groups."""
        return self.algorithm.replaces_groups if self.replace_dead is None else self.replace_dead

    def run(self, stage: Stage, fmt: Format) -> None:
        from lemma.stages.reinforcement.rl_loop import run_reinforcement

        run_reinforcement(stage, self, fmt)
