"""What an algorithm is: options, advantages for groups of samples, and an objective for their tokens.

Each is one small file that puts together pieces of `lemma.algorithms.parts` and `lemma.objectives`. The learner and the
loop treat them all alike: everything they need to know about an algorithm is asked through this interface. Nothing here
imports torch when a recipe is validated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from lemma.algorithms.parts.advantages import rewards_of
from lemma.algorithms.parts.loss_options import Epochs, GroupSize, Level
from lemma.config import Options
from lemma.core.errors import UserError
from lemma.core.types import Group

if TYPE_CHECKING:
    from lemma.objectives import Objective


class AlgorithmState:
    """The state of an algorithm between steps: `numbers`, such as the weight of an adaptive penalty, which are logged
    with the metrics, and `inner` ones, such as the optimiser moments behind it, which are not."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.inner: dict[str, float] = {}

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"numbers": dict(self.numbers), "inner": dict(self.inner)}

    def load(self, tensors: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self.numbers, self.inner = dict(extra["numbers"]), dict(extra["inner"])


RENAMED = {
    "is_live": "has_signal",
    "needs_dead_groups": "needs_all_groups",
    "replaces_dead": "replaces_groups",
    "advice_for_dead_groups": "advice_without_signal",
}
"""Names that algorithms of other people's may still define."""


class Algorithm(Options):
    """What every algorithm has: the number of samples per problem, and how often they are used."""

    name: str = ""
    """Which algorithm."""
    group_size: GroupSize = 8
    epochs: Epochs = 1
    mini_batches: int = Field(1, ge=1)
    """Optimisation steps per pass; a group is never split between them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in RENAMED.keys() & cls.__dict__.keys():
            raise UserError(f"{cls.__name__} defines {name}, which algorithms call {RENAMED[name]}", fix="rename it")

    # --- the advantage and the objective -----------------------------------------------------------------------

    def objective(self, max_tokens: int, memory: AlgorithmState) -> Objective:
        """The loss of one update; `max_tokens` is the longest response."""
        raise AssertionError("an algorithm defines its objective")

    def value_objective(self) -> Objective:
        """The loss of the value model, if there is one."""
        raise AssertionError("an algorithm with a critic defines its objective")

    # --- what the loop calls -----------------------------------------------------------------------------------

    def assign(self, groups: Sequence[Group], memory: AlgorithmState) -> None:
        """Write `advantage` (and anything else the objective needs) into the token fields of every trajectory.

        These are all groups of the step, on every rank.
        """
        raise AssertionError("an algorithm defines assign")

    def credited(self, group: Group) -> np.ndarray:
        """The reward of each episode as the algorithm takes it, clipped or with a penalty for being cut off."""
        return rewards_of(group)

    def has_signal(self, group: Group) -> bool:
        """Whether the rewards of this group give any of its trained tokens an advantage, and so a signal."""
        raise AssertionError("an algorithm defines has_signal")

    def observe(self, metrics: Mapping[str, float], memory: AlgorithmState) -> None:
        """Look at the metrics of a step; this is where controllers update their state."""

    def prefix_lengths(self, trace_tokens: int, *, seed: int, step: int, problem_id: str) -> list[int]:
        """How many tokens of a teacher's trace begin each of the samples; if all of them, nothing is generated."""
        return [0] * self.group_size

    # --- what the loop asks ------------------------------------------------------------------------------------

    needs_critic: ClassVar[bool] = False
    """Whether a value model learns in addition to the policy."""
    compares: ClassVar[bool] = True
    """Whether the samples of a problem are compared with each other, so that equal rewards teach nothing."""
    replaces_groups: ClassVar[int] = 0
    """Maximum number of further rounds of generation that replace groups without signal, unless the stage sets it."""

    @property
    def updates(self) -> int:
        """Optimisation steps on each batch of rollouts."""
        return self.epochs * self.mini_batches

    @property
    def needs_old(self) -> bool:
        """Whether the batch is scored before its first update; if it is used only once, current and old are the
        same."""
        return self.updates > 1

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under the reference model are needed."""
        return False

    @property
    def needs_all_groups(self) -> bool:
        """Whether a group without signal has a gradient nevertheless."""
        return False

    @property
    def scores_first(self) -> bool:
        """Whether advantages depend on log-probabilities or values, so that everything is scored before them."""
        return self.needs_critic

    @property
    def critic_lr(self) -> float | None:
        """Learning rate of the value model; None takes the policy's."""
        return None

    @property
    def critic_path(self) -> str | None:
        """The model whose body the value model begins with; None takes the policy's."""
        return None

    @property
    def uses_traces(self) -> bool:
        """Whether a teacher's traces enter the groups."""
        return False

    @property
    def parts_traces(self) -> bool:
        """Whether part of a trace may begin a sample that the policy then continues."""
        return False

    @property
    def needs_trace_probs(self) -> bool:
        """Whether each trace needs the teacher's probability of each of its tokens."""
        return False

    # --- what recipes and warnings ask -------------------------------------------------------------------------

    @property
    def needs_truncated(self) -> str:
        """Name of the option that needs truncated samples, and so refuses `truncated: mask`; empty if there is none."""
        return ""

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The weight of each reward, if the algorithm rather than the stage weights them."""
        return {}

    @property
    def ratio_level(self) -> Level:
        """Level of the ratio in the loss: a token's own, a product over a turn or trajectory, or a geometric mean over
        a sequence."""
        return "token"

    @property
    def gives_entropy_bonus(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return False

    @property
    def compares_traces(self) -> bool:
        """Whether a teacher's samples are compared with the policy's own, which then need not differ in reward."""
        return False

    @property
    def advice_without_signal(self) -> str:
        """What to change if rewards vary and groups have no signal nevertheless; empty if that is not up to this
        algorithm."""
        return ""
