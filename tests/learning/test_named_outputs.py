"""What models give by name, what trajectories bring beyond one number a token, and that learners pass both on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lemma.core.types import TOKEN_FIELDS, Output, Scope, TokenField, Trajectory
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.critic import build_critic
from lemma.models.model_options import ModelOptions
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy
from lemma.objectives import Loss, LossInputs, Totals
from tests.models.small import CPU, SHAPE, in_float64, tiny_policy, trajectories

LENGTHS = (9, 14, 6, 11)


def learner_of(policy: Policy, budget: int = 10**6) -> Learner:
    return Learner(policy, OptimOptions(lr=0.0), token_budget=budget, total_steps=1)


def batch_of(items: list[Trajectory]) -> TokenBatch:
    return TokenBatch.build(items, range(len(items)), CPU, torch.float64)


def test_outputs_are_functions_of_the_hidden_states() -> None:
    policy = in_float64(tiny_policy())
    batch = batch_of(trajectories(LENGTHS))
    names: tuple[Output, ...] = ("hidden", "logprobs", "entropy", "collisions")
    found = policy.outputs(batch, names, temperature=0.7)
    logp = (found["hidden"] @ policy.head.weight.T / 0.7).log_softmax(-1)
    picked = logp.gather(1, batch.ids_T[batch.targets_N][:, None])[:, 0]
    for name, wanted in (
        ("logprobs", picked),
        ("entropy", -(logp.exp() * logp).sum(-1)),
        ("collisions", (2 * logp).logsumexp(-1)),
    ):
        torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-10)
    assert set(policy.outputs(batch, ["logprobs"])) == {"logprobs"}


def test_a_critic_gives_values_and_no_log_probabilities() -> None:
    critic = build_critic(ModelOptions(tiny=SHAPE), CPU, 0)
    batch = batch_of(trajectories(LENGTHS))
    assert critic.outputs(batch, ["values"])["values"].shape == (batch.trained_tokens,)
    with pytest.raises(AssertionError, match="Critic has no logprobs"):
        critic.outputs(batch, ["logprobs"])


@dataclass(frozen=True)
class NearTargets:
    """Squared distance of hidden states to the first numbers of a wide field, over the whole batch or pack by pack."""

    scope: Scope
    name: str = "near"
    outputs: tuple[Output, ...] = ("hidden", "entropy")

    def __call__(self, terms: LossInputs) -> Loss:
        apart_N = (terms.outputs["hidden"][:, :3] - terms.tokens["targets"]).square().sum(-1)
        mean_B = terms.per_sequence(apart_N) / terms.lengths_B()
        return Loss((mean_B.sum() + terms.entropy_N.sum()) / terms.totals.tokens)


@pytest.fixture
def wide() -> Iterator[list[Trajectory]]:
    TOKEN_FIELDS["targets"] = TokenField("where hidden states should be", width=3)
    made = trajectories(LENGTHS)
    for one in made:
        one.write("targets", np.random.default_rng(len(one)).normal(size=(one.trained_tokens, 3)))
    yield made
    del TOKEN_FIELDS["targets"]


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_an_objective_on_hidden_states_and_a_wide_field(scope: Scope, wide: list[Trajectory]) -> None:
    """The gradient in packs of one sequence, with empty ones, is that of the plain formula."""
    policy, plain = in_float64(tiny_policy()), in_float64(tiny_policy())
    report = learner_of(policy, budget=16).step(wide, NearTargets(scope))
    assert report.packs > 1
    batch = batch_of(wide)
    outputs = plain.outputs(batch, ("hidden", "entropy"))
    terms = LossInputs(outputs, batch.sequence_N, batch.group_B, Totals.of(wide), batch.token_fields)
    loss = NearTargets(scope)(terms).value
    loss.backward()
    grads = [p.grad for p in plain.parameters().values() if p.grad is not None]
    assert report.loss == pytest.approx(loss.item(), rel=1e-10)
    assert report.grad_norm == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-8)


def test_scores_may_have_a_width(wide: list[Trajectory]) -> None:
    found = learner_of(tiny_policy(), budget=16).score(wide, output="hidden")
    assert [part.shape for part in found if part.size] == [(t.trained_tokens, 32) for t in wide if t.trained_tokens]


def test_a_field_of_another_width_than_declared_is_refused(wide: list[Trajectory]) -> None:
    assert wide[2].read("targets").shape == (0, 3) and wide[0].read("old").ndim == 1
    for one in wide:
        one.token_fields["targets"] = one.token_fields["targets"][:, 0]
    with pytest.raises(AssertionError, match="targets is declared"):
        batch_of(wide)


class Marked(nn.Module):
    """A body that adds to the embedding of token 7 a row of `marks` for each, as a model adds what an image says."""

    def __init__(self, body: Any):
        super().__init__()
        self.body, self.layers, self.config = body, body.layers, body.config

    def forward(self, input_ids: torch.Tensor, marks: torch.Tensor | None = None, **more: Any) -> Any:
        embedded = self.body.embed_tokens(input_ids)
        if marks is not None:
            embedded = embedded.masked_scatter((input_ids == 7)[..., None], embedded[input_ids == 7] + marks)
        return self.body(inputs_embeds=embedded, **more)


def marked_items() -> list[Trajectory]:
    """Sequences with the same prompt of ids, one of them without a mark and the others with one or two of their own."""
    items = trajectories((20, 21, 22, 23), share=0.0)
    for number, one in enumerate(items):
        one.ids_T[:10] = np.where(np.arange(10) % 5 == 2, 7, 30) if number else 30
        one.ids_T[10:] = np.where(one.ids_T[10:] == 7, 8, one.ids_T[10:])
        one.loss_mask_T[:] = np.arange(len(one)) >= 10
        if number:
            one.model_inputs["marks"] = np.random.default_rng(number).normal(size=(2, 32)).astype(np.float32)
    return items


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "shared"])
def test_what_the_model_reads_besides_ids_reaches_it(shares: bool) -> None:
    """In a pack of all as in packs of one, whether prompts are shared or not; and it matters."""
    policy = tiny_policy()
    policy.backbone = Marked(policy.backbone)
    items = marked_items()
    learner = Learner(policy, OptimOptions(), token_budget=1000, total_steps=1, share_prompts=shares)
    together = learner.score(items)
    apart = [learner.score([one])[0] for one in items]
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    items[1].model_inputs["marks"] += 1.0
    assert np.abs(learner.score(items)[1] - together[1]).max() > 1e-4
    np.testing.assert_allclose(learner.score(items)[2], together[2], rtol=1e-5, atol=1e-6)
