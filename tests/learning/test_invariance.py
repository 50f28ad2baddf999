"""The gradient of a step does not change with packing, order, micro-batches or padding; tests/cluster adds ranks.

In float64, over every objective of the registry and one toy for each scope; with LoRA, of which an objective knows
nothing, over one of each scope.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from lemma.core.types import Output, Trajectory
from lemma.learning.learner import Learner, StepReport
from lemma.learning.learning_options import OptimOptions
from lemma.models.policy import Policy
from lemma.objectives import Loss, LossInputs, Objective, Totals
from tests.models.small import VALUED, in_float64, relative, tiny_policy, trajectories
from tests.objectives.forms import OBJECTIVES
from tests.objectives.toys import TOYS

EXACT = 1e-10
LENGTHS = (7, 31, 5, 12, 2, 40, 19, 19, 3, 26)
MAKE: dict[str, Callable[[], Objective]] = {**OBJECTIVES, **{name: lambda toy=toy: toy for name, toy in TOYS.items()}}
CASES = [*(("full", name) for name in MAKE), *(("lora", name) for name in ("policy_clip_sequence", "dpo", *TOYS))]
SIDES = (("right", 0), ("right", 9), ("left", 5))


def items_of(policy: Policy) -> list[Trajectory]:
    """Trajectories of a policy that was almost this one: ratios are near 1, on both sides of what is clipped."""
    items = trajectories(LENGTHS)
    learner = Learner(policy, OptimOptions(), token_budget=10**6, total_steps=1, temperature=0.7)
    noise = np.random.default_rng(5)
    for item, scores in zip(items, learner.score(items), strict=True):
        old, behaviour = np.zeros(len(item)), np.zeros(len(item))
        old[item.loss_mask_T] = scores + 0.15 * noise.normal(size=len(scores))
        behaviour[item.loss_mask_T] = old[item.loss_mask_T] + 0.05 * noise.normal(size=len(scores))
        item.token_fields |= {"old": old, "sampler_logprobs": behaviour}
    return items


@dataclass
class Outcome:
    report: StepReport
    grads: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["full", "lora"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return in_float64(tiny_policy(lora=request.param == "lora"))


@pytest.fixture(scope="module")
def items(policy: Policy) -> list[Trajectory]:
    return items_of(policy)


@dataclass
class Padded:
    """The plain model on padded batches: what it says of each, to be differentiated for one objective after another."""

    parameters: dict[str, torch.nn.Parameter]
    outputs: list[tuple[list[torch.Tensor], ...]]


@pytest.fixture(scope="module")
def padded(policy: Policy, items: list[Trajectory]) -> Padded:
    """By a copy, whose weights nobody touches."""
    plain = copy.deepcopy(policy)
    outputs = [padded_outputs(plain, items, max(LENGTHS) + extra, side) for side, extra in SIDES]
    return Padded(dict(plain.parameters()), outputs)


def one_step(policy: Policy, items: Sequence[Trajectory], objective: Objective, budget: int) -> Outcome:
    """What a step does to a policy, which is put back afterwards."""
    before = {name: p.detach().clone() for name, p in policy.parameters().items()}
    learner = Learner(policy, OptimOptions(lr=1e-3, clip=0.5), token_budget=budget, total_steps=4, temperature=0.7)
    grads: dict[str, torch.Tensor] = {}
    update = learner.optimiser.step

    def recorded(rate: float) -> tuple[float, bool]:
        for name, master in learner.optimiser.masters.items():
            grads[name] = torch.zeros_like(master) if master.grad is None else master.grad.clone()
        return update(rate)

    learner.optimiser.step = recorded  # type: ignore[method-assign]
    report = learner.step(items, objective)
    weights = {name: p.detach().clone() for name, p in policy.parameters().items()}
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            parameter.copy_(before[name])
    return Outcome(report, grads, weights)


def assert_same(mine: Outcome, other: Outcome) -> None:
    assert mine.report.loss == pytest.approx(other.report.loss, rel=EXACT)
    assert mine.report.metrics == pytest.approx(other.report.metrics, rel=EXACT)
    assert mine.report.grad_norm == pytest.approx(other.report.grad_norm, rel=EXACT)
    assert_gradients(mine.grads, other.grads)
    for name, weight in other.weights.items():
        assert relative(mine.weights[name], weight) < EXACT, name


def assert_gradients(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys()
    size = torch.cat([grad.flatten() for grad in other.values()]).norm().item()
    assert size > 1e-6
    for name, grad in other.items():
        assert relative(mine[name], grad, floor=1e-3 * size) < EXACT, name


@pytest.mark.parametrize(("policy", "name"), CASES, indirect=["policy"])
def test_packing_order_and_micro_batches_do_not_matter(policy: Policy, items: list[Trajectory], name: str) -> None:
    objective = MAKE[name]()
    whole = one_step(policy, items, objective, budget=10**6)
    assert whole.report.packs == 1
    alone = one_step(policy, items, objective, budget=1)
    assert alone.report.packs == (5 if objective.scope == "pair" else len(items))
    assert_same(alone, whole)
    for seed, budget in ((1, 41), (2, 64), (3, 100)):
        order = np.random.default_rng(seed).permutation(len(items)).tolist()
        shuffled = one_step(policy, [items[i] for i in order], objective, budget)
        assert 1 < shuffled.report.packs < len(items)
        assert_same(shuffled, whole)


@pytest.mark.parametrize(("policy", "name"), CASES, indirect=["policy"])
def test_equals_a_padded_batch_through_the_plain_model(
    policy: Policy, items: list[Trajectory], padded: Padded, name: str
) -> None:
    objective = MAKE[name]()
    mine = one_step(policy, items, objective, budget=64)
    for outputs in padded.outputs:
        loss = plain_loss(name, objective, items, *outputs)
        parameters = list(padded.parameters.values())
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True, retain_graph=True)
        assert mine.report.loss == pytest.approx(loss.item(), rel=EXACT)
        assert_gradients(mine.grads, dict(zip(padded.parameters, grads, strict=True)))


def padded_outputs(
    policy: Policy, items: Sequence[Trajectory], width: int, side: str, temperature: float = 0.7
) -> tuple[list[torch.Tensor], ...]:
    """Log-probabilities, entropies and values of the trained tokens of each sequence, from one padded batch."""
    ids = torch.full((len(items), width), 1)
    mask, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    spans = []
    for row, item in enumerate(items):
        start = 0 if side == "right" else width - len(item)
        spans.append(slice(start, start + len(item)))
        ids[row, spans[row]] = torch.from_numpy(item.ids_T)
        mask[row, spans[row]] = 1
        positions[row, spans[row]] = torch.arange(len(item))
    logits = policy.causal(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logp = (logits / temperature).log_softmax(-1)
    logprobs, entropies, values = [], [], []
    for row, (item, span) in enumerate(zip(items, spans, strict=True)):
        targets = torch.from_numpy(np.flatnonzero(item.loss_mask_T))
        rows = logp[row, span][targets - 1]
        logprobs.append(rows.gather(-1, torch.from_numpy(item.ids_T)[targets][:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
        values.append(logits[row, span][targets - 1, VALUED])
    return logprobs, entropies, values


def plain_loss(
    name: str,
    objective: Objective,
    items: Sequence[Trajectory],
    logprobs: list[torch.Tensor],
    entropies: list[torch.Tensor],
    values: list[torch.Tensor],
) -> torch.Tensor:
    """The loss written down for the whole batch; for objectives without a formula here, their own on the whole."""
    tokens = sum(len(part) for part in logprobs)
    if name == "nll_token":
        return -torch.cat(logprobs).mean()
    if name == "nll_sequence":
        return -sum(part.mean() for part in logprobs if len(part)) / len(items)
    if name == "nll_constant":
        return -torch.cat(logprobs).sum() / (42.0 * len(items))
    if name == "toy_pair":
        margins = [logprobs[i].sum() - logprobs[i + 1].sum() for i in range(0, len(items), 2)]
        return torch.stack([torch.log1p(torch.exp(-0.1 * margin)) for margin in margins]).mean()
    if name == "toy_batch":
        means = torch.stack([part.sum() / max(len(part), 1) for part in logprobs])
        weights = torch.tensor([item.fields["weight"] for item in items], dtype=torch.float64)
        return (weights * (means - means.mean()) ** 2).mean() + torch.cat(entropies).mean() ** 2
    fields = {key: torch.tensor([item.fields[key] for item in items], dtype=torch.float64) for key in items[0].fields}
    tokens_of = {
        key: torch.cat([torch.from_numpy(item.token_fields[key][item.loss_mask_T]) for item in items])
        for key in items[0].token_fields
    }
    terms = LossInputs(
        outputs={"logprobs": torch.cat(logprobs), "entropy": torch.cat(entropies), "values": torch.cat(values)},
        sequence_N=torch.repeat_interleave(torch.tensor([len(part) for part in logprobs])),
        group_B=torch.tensor([item.group_id for item in items]),
        totals=Totals(float(tokens), float(len(items)), float(len({item.group_id for item in items}))),
        tokens=tokens_of,
        fields=fields,
    )
    return objective(terms).value


def test_a_pack_without_a_trained_token_still_counts(policy: Policy) -> None:
    """A pair in which nothing is learnt has a loss, log 2, wherever it is packed."""
    items = trajectories((9, 9, 9, 9))
    for item in items[2:]:
        item.loss_mask_T[:] = False
    toy = TOYS["toy_pair"]
    together, apart = (one_step(policy, items, toy, budget) for budget in (100, 18))
    assert (together.report.packs, apart.report.packs) == (1, 2)
    assert_same(apart, together)
    nothing = [replace(item, loss_mask_T=np.zeros(9, dtype=bool)) for item in items]
    assert one_step(policy, nothing, toy, 18).report.loss == pytest.approx(np.log(2), rel=EXACT)


@dataclass(frozen=True)
class Blind:
    """A batch objective that does not look at the entropies it asked for."""

    name: str = "blind"
    scope: str = "batch"
    outputs: tuple[Output, ...] = ("logprobs", "entropy")

    def __call__(self, terms: LossInputs) -> Loss:
        return Loss(terms.logprobs_N.mean())


def test_a_batch_objective_need_not_use_what_it_sees(policy: Policy) -> None:
    items = trajectories(LENGTHS)
    assert_same(one_step(policy, items, Blind(), 64), one_step(policy, items, Blind(), 10**6))  # type: ignore[arg-type]
