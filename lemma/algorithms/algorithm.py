"""What an algorithm is: advantages for groups of trajectories, and an objective for their tokens.

Each is one small file of options and of choices among the pieces of `lemma.objectives`. The learner and the loop
serve them all alike. Nothing here imports torch when a recipe is validated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from lemma.config import Options
from lemma.core.ranks import join_over_ranks
from lemma.core.types import Group, Trajectory

if TYPE_CHECKING:
    from lemma.objectives import Objective

KlEstimator = Literal["k1", "k2", "k3", "abs", "mse", "low_var_kl"]
K1_IN_LOSS = "the gradient of k1 in a loss is 0 on average, so that the KL would cost nothing; write `kl_estimator: k3`"


class Memory:
    """What an algorithm remembers between steps: numbers by name, such as the weight of an adaptive penalty, which are
    logged with the metrics, and `inner` ones, such as the moments behind it, which are not."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.inner: dict[str, float] = {}

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"numbers": dict(self.numbers), "inner": dict(self.inner)}

    def load(self, tensors: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self.numbers, self.inner = dict(extra["numbers"]), dict(extra["inner"])


class Algorithm(Options):
    """What every algorithm has: how many samples it takes of a problem, and how often they are used."""

    name: str = ""
    """Which algorithm."""
    group_size: int = Field(8, ge=1)
    """Samples per problem."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch of rollouts."""
    mini_batches: int = Field(1, ge=1)
    """Optimisation steps in each pass; groups are dealt out to them whole."""

    needs_critic: ClassVar[bool] = False
    """Whether a value model learns beside the policy."""
    replaces_dead: ClassVar[int] = 0
    """Most further rounds of generation that replace groups without advantages, where the stage does not say."""

    @property
    def updates(self) -> int:
        """Optimisation steps on each batch of rollouts."""
        return self.epochs * self.mini_batches

    @property
    def uses_traces(self) -> bool:
        """Whether a teacher's traces enter the groups."""
        return False

    @property
    def compares(self) -> bool:
        """Whether the samples of a problem are compared with each other, so that one reward for all teaches nothing."""
        return True

    @property
    def needs_old(self) -> bool:
        """Whether the batch is scored before its first update; used once, current and old are the same."""
        return self.updates > 1

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under the reference model are wanted."""
        return False

    @property
    def needs_dead_groups(self) -> bool:
        """Whether a group without advantages carries a gradient all the same."""
        return False

    @property
    def critic_lr(self) -> float | None:
        """Learning rate of the value model; None takes the policy's."""
        return None

    @property
    def scores_first(self) -> bool:
        """Whether advantages depend on log-probabilities or values, so that everything is scored before them."""
        return self.needs_critic

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One advantage for each trajectory, from the rewards of each group."""
        raise AssertionError("an algorithm defines advantages or assign")

    def assign(self, groups: Sequence[Group], memory: Memory) -> None:
        """Write `advantage` (and what else the objective needs) into the token fields of every trajectory.

        These are the groups of this rank; statistics over the batch are those of all ranks.
        """
        everything, own = join_over_ranks([rewards_of(group) for group in groups])
        write_advantages(groups, self.advantages(everything)[own])

    def is_live(self, group: Group) -> bool:
        """Whether the rewards of this group give any of its trajectories an advantage."""
        return bool(np.any(self.advantages([rewards_of(group)])[0] != 0))

    def objective(self, max_tokens: int, memory: Memory) -> Objective:
        """The loss of one update; `max_tokens` is the longest response."""
        raise AssertionError("an algorithm defines its objective")

    def value_objective(self) -> Objective:
        """The loss of the value model, where there is one."""
        raise AssertionError("an algorithm with a critic defines its objective")

    def observe(self, metrics: Mapping[str, float], memory: Memory) -> None:
        """Look at the metrics of a step; controllers change what they remember here."""

    def prefix_lengths(self, trace_tokens: int, *, seed: int, step: int, problem_id: str) -> list[int]:
        """How many tokens of a teacher's trace begin each of the samples; all of them: nothing is generated."""
        return [0] * self.group_size


def write_advantages(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> None:
    """The advantage of each sample at all of its tokens."""
    for group, found in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, found, strict=True):
            trajectory.token_fields["advantage"] = np.full(len(trajectory), advantage)


def write_tokens(name: str, trajectories: Sequence[Trajectory], rows: np.ndarray) -> None:
    """A number for each chosen token, from rows that may be longer; 0 elsewhere."""
    for trajectory, numbers in zip(trajectories, rows, strict=True):
        trajectory.token_fields[name] = np.zeros(len(trajectory))
        trajectory.token_fields[name][trajectory.chosen_T] = numbers[: trajectory.trained_tokens]


def rewards_of(group: Group) -> np.ndarray:
    return np.array([trajectory.rewards["total"] for trajectory in group.trajectories], dtype=np.float64)
