"""Gradients that products add to the optimiser's sums themselves, in a whole step of the learner."""

from __future__ import annotations

import pytest
import torch

from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.learning.optimiser import Split
from lemma.models import installing
from lemma.models.joint_products import sink_of
from lemma.objectives import NegativeLogLikelihood
from tests.models.small import relative, tiny_policy, trajectories


def step(jointly: bool, recomputed: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the second of two steps on several packs, and the weights after it."""
    policy = tiny_policy(precision="bf16")
    installing.install(policy.causal, fused=False, jointly=jointly)
    policy.recompute(recomputed)
    learner = Learner(policy, OptimOptions(lr=1e-2), token_budget=40, total_steps=4)
    assert all(sink_of(parameter) is not None for parameter in policy.parameters().values())
    for _ in range(2):
        report = learner.step(trajectories((12, 20, 9, 31, 17)), NegativeLogLikelihood("token"))
    assert report.packs > 1 and report.grad_norm > 0
    return report.loss, {name: master.detach() for name, master in learner.optimiser.masters.items()}


@pytest.mark.parametrize("recomputed", [0, 1, 2])
def test_a_step_with_sinks_is_the_step_without(recomputed: int) -> None:
    loss, weights = step(jointly=False, recomputed=0)
    sunk_loss, sunk = step(jointly=True, recomputed=recomputed)
    assert sunk_loss == pytest.approx(loss, rel=1e-2)
    start = {name: p.detach().float() for name, p in tiny_policy(precision="bf16").parameters().items()}
    for name, weight in weights.items():
        moved = relative(weight - start[name], torch.zeros_like(weight), floor=1.0)
        apart = relative(sunk[name] - weight, torch.zeros_like(weight), floor=1.0)
        assert apart < 0.2 * moved, (name, apart, moved)


@pytest.mark.parametrize("shard", ["none", "gradients"])
def test_the_last_learner_of_a_policy_has_its_gradients(shard: Split) -> None:
    norms = []
    for before in ([], ["none"], ["gradients", "none"]):
        policy = tiny_policy(precision="bf16")
        splits: list[Split] = [*before, shard]  # type: ignore[list-item]
        made = [Learner(policy, OptimOptions(), token_budget=64, total_steps=4, shard=split) for split in splits]
        norms.append(made[-1].step(trajectories((12, 20)), NegativeLogLikelihood("token")).grad_norm)
    assert norms[0] == norms[1] == norms[2] > 0
