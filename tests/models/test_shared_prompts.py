"""Packs that hold a shared prompt once, beside packs that hold it for every answer: in all families, in any shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lemma.core.types import Trajectory
from lemma.models import installing
from lemma.models.packing import TokenBatch, plan_packs
from lemma.models.policy import Policy
from lemma.models.sharing import can_share, shared_size
from tests.models.families import LEARNER_ONLY, TAKEN, family_policy
from tests.models.small import CPU, relative

FAMILIES = {**TAKEN, **{name: values for name, (values, _) in LEARNER_ONLY.items()}}


@dataclass(frozen=True)
class Attempt:
    """The number and length of its prompt, and the lengths of what is said and heard in turn; `said` may be empty."""

    prompt: int
    length: int
    said: tuple[int, ...]

    def trajectory(self, number: int, words: int = 300) -> Trajectory:
        """Prompts of the same number begin alike, however long they are."""
        prompt = np.random.default_rng(self.prompt).integers(0, words, 40)[: self.length]
        rng = np.random.default_rng((self.prompt, self.length, number))
        turns = [np.full(count, turn % 2 == 0) for turn, count in enumerate(self.said)]
        chosen = np.concatenate([np.zeros(self.length, dtype=bool), *turns])
        ids = np.concatenate([prompt, rng.integers(0, words, len(chosen) - self.length)])
        return Trajectory(ids, chosen, group_id=self.prompt)


# Groups with several turns, of one, of identical prompts, of prompts of one token, too short to share, and one prompt
# that begins another; an attempt that says nothing, and one that says one token.
HARD = (
    *(Attempt(1, 12, said) for said in ((5,), (3, 4, 2), (1,), ())),
    Attempt(2, 9, (6,)),
    *(Attempt(3, 1, said) for said in ((4,), (7,))),
    *(Attempt(4, 7, said) for said in ((3,), (3,))),
    *(Attempt(1, 20, said) for said in ((4,), (2, 1, 1))),
)


def pulled(
    policy: Policy, items: Sequence[Trajectory], packs: Sequence[Sequence[int]], share: bool
) -> dict[str, torch.Tensor]:
    """Log-probabilities of all trained tokens in the order of the items, and the gradient of a sum of them in which
    each has its own weight."""
    scores: dict[int, torch.Tensor] = {}
    policy.module.zero_grad()
    policy.module.train()
    for pack in packs:
        batch = TokenBatch.build(items, pack, CPU, torch.float64, share)
        if not batch.trained_tokens:
            continue
        logprobs = policy.logprobs(batch)
        sizes = torch.bincount(batch.sequence_N, minlength=len(batch.index_B)).tolist()
        parts = dict(zip(batch.index_B, logprobs.split(sizes), strict=True))
        loss = sum((part * torch.sin(index + torch.arange(len(part)))).sum() for index, part in parts.items())
        torch.as_tensor(loss).backward()
        scores |= {index: part.detach() for index, part in parts.items() if len(part)}
    found = {name: p.grad.clone() for name, p in policy.parameters().items() if p.grad is not None}
    return {"scores": torch.cat([scores[index] for index in sorted(scores)]), **found}


def check_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], limit: float = 1e-9) -> None:
    assert found.keys() == wanted.keys() and found["scores"].shape == wanted["scores"].shape
    size = torch.cat([value.flatten() for value in wanted.values()]).norm().item()
    for name, value in wanted.items():
        assert relative(found[name], value, floor=1e-3 * size) < limit, name


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family(kind: str) -> None:
    is_mixture = "num_experts" in FAMILIES[kind]
    policy = family_policy(kind, FAMILIES[kind], torch.float32 if is_mixture else torch.float64)
    for module, name in policy.dropouts:
        setattr(module, name, 0.0)
    if not can_share(policy.module):
        assert kind.startswith("lfm2")
        return
    items = [attempt.trajectory(number) for number, attempt in enumerate(HARD)]
    # Some compute their norms in float32; a mixture is all of it, and without AVX Granite's gradients are 3e-4 apart.
    everything, limit = range(len(items)), 1e-3 if is_mixture else 1e-6
    wanted = pulled(policy, items, [[index] for index in everything], share=False)
    check_same(pulled(policy, items, [everything], share=True), wanted, limit)
    if any(hasattr(module, "lemma_jointly") for module in policy.module.modules()):
        installing.install(policy.module, fused=False, jointly=True)
        check_same(pulled(policy, items, [everything], share=True), wanted, limit)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return family_policy("qwen2", TAKEN["qwen2"], torch.float64)


attempts = st.builds(
    Attempt,
    st.integers(1, 3),
    st.sampled_from([1, 7, 8, 9, 13, 30]),
    st.lists(st.integers(1, 9), max_size=4).map(tuple),
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(made=st.lists(attempts, min_size=1, max_size=9), budget=st.sampled_from([1, 12, 25, 60, 1000]))
def test_any_groups(policy: Policy, made: list[Attempt], budget: int) -> None:
    items = [attempt.trajectory(number) for number, attempt in enumerate(made)]
    packs = plan_packs(items, budget, "token", share=0.1)
    assert sorted(index for pack in packs for index in pack) == list(range(len(items)))
    assert all(len(pack) == 1 or shared_size(items, pack, 0.1) <= budget for pack in packs)
    if any(item.trained_tokens for item in items):
        wanted = pulled(policy, items, [[index] for index in range(len(items))], share=False)
        check_same(pulled(policy, items, packs, share=True), wanted)
