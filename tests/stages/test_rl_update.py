"""The gradient of a whole update, from rewards to the last optimisation step, in float64: the same under packing,
order, micro-batches and two ranks, and whether groups without advantages are computed or only counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lemma.algorithms import ALGORITHMS, Algorithm, AlgorithmState
from lemma.core.types import Group, Message, Problem, Trajectory
from lemma.learning.learner import Learner, StepReport
from lemma.learning.learning_options import OptimOptions
from lemma.models.critic import Critic
from lemma.models.policy import Policy
from lemma.stages.reinforcement.rl_loop import add_scores, has_advantage, update
from lemma.stages.reinforcement.rl_metrics import update_metrics
from tests.models.small import CPU, WORDS, in_float64, relative, tiny_policy

EXACT = 1e-9
STAGE: Any = SimpleNamespace(seed=3, name="rl")
MAX_TOKENS = 16
DEAD = (1, 4)

ALGORITHM: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "epochs": 2, "mini_batches": 2},
    "grpo_once": {"name": "grpo", "mismatch_cap": 2.0},
    "dapo": {"name": "dapo", "epochs": 2},
    "gspo": {"name": "gspo", "mini_batches": 2},
    "luffy": {"name": "luffy", "mini_batches": 2, "entropy": 0.0, "normalise": "token"},
    "luffy_once": {"name": "luffy", "entropy": 0.0},
    "ppo": {
        "name": "ppo",
        "epochs": 2,
        "mini_batches": 2,
        "compat": {"whiten_rewards": True},
        "adaptive_kl": {"target": 0.1, "horizon": 40.0},
    },
    "of_the_batch": {"name": "grpo", "scale": "batch", "entropy_target": 3.0},
    "rloo": {"name": "rloo", "standardise": True},
    "rloo_kl": {"name": "rloo", "standardise": True, "reward_kl": 0.1, "mini_batches": 3},
    "reinforce_plus_plus": {"name": "reinforce", "whiten": True, "gamma": 0.9},
    "each_reward": {"name": "grpo", "each_reward": {"accuracy": 1.0, "style": 0.5}},
}
WITHOUT_DEAD = [name for name in ALGORITHM if name not in ("ppo", "of_the_batch", "rloo_kl", "reinforce_plus_plus")]


def make(name: str) -> Algorithm:
    options = ALGORITHM[name]
    return ALGORITHMS[options["name"]](group_size=4, **options)


def groups(count: int = 6, size: int = 4) -> list[Group]:
    """Groups of prompts and responses of any length; those of `DEAD` have one reward throughout. A teacher wrote the
    first response of each and began the second."""
    made = []
    for number in range(count):
        noise = np.random.default_rng((7, number))
        prompt = noise.integers(3, WORDS, int(noise.integers(2, 9)))
        group = Group(Problem((Message("user", f"question {number}"),), ("1",)), [])
        for place in range(size):
            response = noise.integers(3, WORDS, int(noise.integers(1, MAX_TOKENS + 1)))
            length = len(prompt) + len(response)
            given = {0: len(response), 1: len(response) // 2}.get(place, 0)
            accuracy, style = (1.0, 0.0) if number in DEAD else (float(noise.integers(0, 2)), 0.1 * (place == 3))
            answered = np.arange(length) - len(prompt)
            group.trajectories.append(
                Trajectory(
                    ids_T=np.concatenate([prompt, response]),
                    loss_mask_T=answered >= 0,
                    rewards={"total": accuracy + style, "accuracy": accuracy, "style": style},
                    finish="length" if place == 2 else "stop",
                    group_id=number,
                    token_fields={
                        "off": ((answered >= 0) & (answered < given)).astype(np.float64),
                        "sampler_logprobs": -noise.random(length) * 4,
                    },
                )
            )
        made.append(group)
    return made


@dataclass
class Outcome:
    reports: list[StepReport]
    grads: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    remembered: dict[str, float]


@dataclass
class Other:
    """A reference that says something else than the policy."""

    policy: Policy
    learner: Learner

    def scores(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        return self.learner.score(trajectories, self.policy)


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield in_float64(tiny_policy())
    torch.set_num_threads(threads)


def whole_update(
    policy: Policy, batch: Sequence[Group], algorithm: Algorithm, budget: int, *, all_groups: bool = False
) -> Outcome:
    """What the loop does with a step's groups, on a policy that is put back afterwards."""
    batch = deepcopy(list(batch))
    before = {name: p.detach().clone() for name, p in policy.parameters().items()}
    learner = Learner(policy, OptimOptions(lr=1e-3, clip=0.5), token_budget=budget, total_steps=9, temperature=0.8)
    grads: list[dict[str, torch.Tensor]] = []
    step = learner.optimiser.step

    def recorded(rate: float) -> tuple[float, bool]:
        masters = learner.optimiser.masters.items()
        grads.append({n: torch.zeros_like(m) if m.grad is None else m.grad.clone() for n, m in masters})
        return step(rate)

    learner.optimiser.step = recorded  # type: ignore[method-assign]
    memory, critic = AlgorithmState(), critic_of(algorithm, budget)
    reference = Other(in_float64(tiny_policy(seed=2)), learner) if algorithm.needs_reference else None
    parts: Any = SimpleNamespace(
        algorithm=algorithm, memory=memory, learner=learner, critic=critic, reference=reference,
        needs_old=algorithm.needs_old,
    )  # fmt: skip
    if algorithm.scores_first:
        add_scores(batch, parts)
    algorithm.assign(batch, memory)
    worth = [group for group in batch if all_groups or algorithm.needs_all_groups or has_advantage(group)]
    if not algorithm.scores_first:
        add_scores(worth, parts)
    reports = update(STAGE, 1, parts, batch, worth, MAX_TOKENS)
    algorithm.observe(update_metrics(reports), memory)
    assert learner.step_count == algorithm.updates
    models = {"": policy} if critic is None else {"": policy, "critic ": critic.policy}
    weights = {f"{part}{name}": p.detach().clone() for part, m in models.items() for name, p in m.parameters().items()}
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            parameter.copy_(before[name])
    return Outcome(reports, grads, weights, memory.numbers)


def critic_of(algorithm: Algorithm, budget: int) -> Learner | None:
    if not algorithm.needs_critic:
        return None
    critic = Critic(in_float64(tiny_policy(seed=1)).backbone, 32, CPU, 3)
    critic.module.double()
    return Learner(critic, OptimOptions(lr=1e-3, clip=0.5), token_budget=budget, total_steps=9)


def assert_same(mine: Outcome, other: Outcome) -> None:
    assert len(mine.grads) == len(other.grads)
    for own, true in zip(mine.grads, other.grads, strict=True):
        size = torch.cat([grad.flatten() for grad in true.values()]).norm().item()
        assert size > 1e-6
        for name, grad in true.items():
            assert relative(own[name], grad, floor=1e-3 * size) < EXACT, name
    for name, weight in other.weights.items():
        assert relative(mine.weights[name], weight) < EXACT, name
    assert mine.remembered == pytest.approx(other.remembered, rel=EXACT)


@pytest.mark.parametrize("name", ALGORITHM)
def test_packing_and_micro_batches_do_not_matter(policy: Policy, name: str) -> None:
    whole = whole_update(policy, groups(), make(name), budget=10**6)
    assert {report.packs for report in whole.reports} == {1} and len(whole.grads) == make(name).updates
    for budget in (1, 40):
        apart = whole_update(policy, groups(), make(name), budget)
        assert all(report.packs > 1 for report in apart.reports)
        assert_same(apart, whole)
        for own, true in zip(apart.reports, whole.reports, strict=True):
            assert own.loss == pytest.approx(true.loss, rel=EXACT)
            assert own.metrics == pytest.approx(true.metrics, rel=EXACT, abs=1e-12)


@pytest.mark.parametrize("name", ALGORITHM)
def test_order_does_not_matter(policy: Policy, name: str) -> None:
    """Samples of a group in any order, and groups too: mini-batches are dealt out by the order of drawing."""
    whole = whole_update(policy, groups(), make(name), budget=90)
    shuffled = groups()
    noise = np.random.default_rng(1)
    for group in shuffled:
        group.trajectories = [group.trajectories[i] for i in noise.permutation(len(group.trajectories))]
    shuffled = [shuffled[i] for i in noise.permutation(len(shuffled))]
    assert_same(whole_update(policy, shuffled, make(name), budget=90), whole)


@pytest.mark.parametrize("name", WITHOUT_DEAD)
def test_a_group_without_advantages_that_is_left_out_counts_all_the_same(policy: Policy, name: str) -> None:
    left_out = whole_update(policy, groups(), make(name), budget=90)
    computed = whole_update(policy, groups(), make(name), budget=90, all_groups=True)
    assert sum(r.trained_tokens for r in left_out.reports) < sum(r.trained_tokens for r in computed.reports)
    assert_same(left_out, computed)
    without = whole_update(policy, [g for i, g in enumerate(groups()) if i not in DEAD], make(name), budget=90)
    name = "model.embed_tokens.weight"
    assert relative(without.grads[0][name], computed.grads[0][name]) > 1e-3


def test_a_batch_without_advantages_changes_nothing_and_the_schedule_goes_on(policy: Policy) -> None:
    outcome = whole_update(policy, [groups()[i] for i in DEAD], make("grpo"), budget=90)
    assert not outcome.reports and not outcome.grads
    assert all(torch.equal(outcome.weights[name], p) for name, p in policy.parameters().items())
