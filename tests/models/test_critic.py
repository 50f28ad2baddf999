"""The value model: what its values depend on, that it learns, and that packing does not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lemma.core.types import Trajectory
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.critic import Critic, build_critic
from lemma.models.model_options import LoraOptions, ModelOptions
from lemma.models.packing import TokenBatch
from lemma.objectives.value import ClippedValueLoss
from tests.models.small import CPU, SHAPE, relative, trajectories

LENGTHS = (7, 31, 5, 12, 2, 40)


def critic(lora: bool = False, seed: int = 0, dtype: torch.dtype = torch.float64) -> Critic:
    adapter = LoraOptions(r=3, alpha=6) if lora else None
    made = build_critic(ModelOptions(tiny=SHAPE, lora=adapter), CPU, seed)
    made.module.to(dtype)
    return made


def learner_of(critic: Critic, budget: int = 10**6, lr: float = 3e-3) -> Learner:
    return Learner(critic, OptimOptions(lr=lr), token_budget=budget, total_steps=50)  # type: ignore[arg-type]


def items(learner: Learner) -> list[Trajectory]:
    """Returns that depend on the last token seen, and the critic's own values as the old ones."""
    made = trajectories(LENGTHS)
    for item, values in zip(made, learner.score(made, output="values"), strict=True):
        old = np.zeros(len(item))
        old[item.loss_mask_T] = values
        before = np.concatenate([[0], item.ids_T[:-1]])
        item.token_fields |= {"value": old, "return": np.where(before % 2 == 0, 1.0, -1.0)}
    return made


def test_a_value_is_of_the_state_before_the_token() -> None:
    """It changes with what comes before and not with the token itself, and nothing leaks from another sequence."""
    model = critic()
    ids = np.array([5, 6, 7, 8])
    chosen = np.array([False, False, True, False])

    def value(changed: dict[int, int], beside: bool = False) -> float:
        mine = ids.copy()
        for place, word in changed.items():
            mine[place] = word
        both = [Trajectory(np.array([9, 9, 9]), np.array([False, False, beside])), Trajectory(mine, chosen)]
        batch = TokenBatch.build(both, [0, 1], CPU, torch.float64)
        with torch.no_grad():
            return model.outputs(batch, ["values"])["values"][-1].item()

    assert value({}) == value({2: 20}) == value({3: 21})
    assert value({}) == pytest.approx(value({}, beside=True), rel=1e-12)
    assert abs(value({}) - value({1: 20})) > 1e-9
    assert abs(value({})) < 1.0


@pytest.mark.parametrize("lora", [False, True])
def test_steps_lower_the_value_loss(lora: bool) -> None:
    learner = learner_of(critic(lora, dtype=torch.float32), lr=1e-2)
    mine = items(learner)
    losses = [learner.step(mine, ClippedValueLoss(clip=None)).loss for _ in range(30)]
    assert losses[0] == pytest.approx(0.5, abs=0.1), "values near 0 are half a squared 1 away from their returns"
    assert losses[-1] < 0.25 * losses[0]


def test_a_critic_with_adapters_trains_only_them_and_the_head() -> None:
    names = critic(lora=True).parameters()
    assert "head.weight" in names and all("lora_" in name for name in names if name != "head.weight")
    assert any("embed" in name for name in critic().parameters())


def test_the_gradient_does_not_change_with_the_packing() -> None:
    weights = []
    for budget in (10**6, 40, 1):
        learner = learner_of(critic(), budget)
        learner.step(items(learner), ClippedValueLoss(clip=0.2, weight=0.1))
        weights.append({name: p.detach().clone() for name, p in learner.policy.parameters().items()})
    for other in weights[1:]:
        for name, weight in weights[0].items():
            assert relative(other[name], weight) < 1e-10, name


def test_its_state_goes_on_exactly() -> None:
    """Three steps in a row, or one, a state saved and loaded into a critic of another seed, and two more."""
    objective = ClippedValueLoss()
    straight = learner_of(critic())
    mine = items(straight)
    for _ in range(3):
        straight.step(mine, objective)
    first = learner_of(critic())
    first.step(mine, objective)
    second = learner_of(critic(seed=1))
    tensors, extra = first.state()
    second.load({name: tensor.clone() for name, tensor in tensors.items()}, extra)
    for _ in range(2):
        second.step(mine, objective)
    for name, weight in straight.policy.parameters().items():
        assert torch.equal(weight, second.policy.parameters()[name]), name


def test_the_head_depends_on_the_seed_alone() -> None:
    assert torch.equal(critic(seed=3).head.weight, critic(seed=3).head.weight)
    assert not torch.equal(critic(seed=3).head.weight, critic(seed=4).head.weight)
