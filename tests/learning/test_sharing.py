"""Prompts that are computed once for all of their answers: the same numbers as with a prompt for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from lemma.core.types import Trajectory
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models import sharing as sharing_module
from lemma.models.critic import Critic
from lemma.models.fitting import USUAL
from lemma.models.memory import Shape
from lemma.models.packing import TokenBatch, plan_packs
from lemma.models.policy import Policy
from lemma.models.sharing import (
    LEAST_COST,
    SHORTEST,
    USUAL_COST,
    Sharing,
    can_share,
    families,
    shared_size,
    spread_cost,
)
from lemma.objectives import Objective
from tests.models.small import CPU, SHAPE, WORDS, in_float64, relative, tiny_policy, trajectories
from tests.objectives.forms import OBJECTIVES

EXACT = 1e-10
PROMPTS = (SHORTEST + 3, SHORTEST, 20, SHORTEST - 1)


@pytest.fixture(scope="module", params=["full", "lora", "recomputed"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return in_float64(tiny_policy(lora=request.param == "lora", checkpointing=request.param == "recomputed"))


def answers() -> list[Trajectory]:
    """Four prompts, the last one too short to share, with up to six answers each, in no order; one learns nothing."""
    lengths = (30, 14, 29, 40, 21, 33, 25, 12, 38, 27, 26, 31, 24, 19, 36, 22)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, WORDS, length) for length in PROMPTS]
    made = trajectories([*lengths])
    for number, item in enumerate(made):
        prompt = prompts[(number // 2) % len(prompts)]
        if len(item) <= len(prompt) or not item.loss_mask_T.any():
            continue
        item.ids_T[: len(prompt)] = prompt
        item.loss_mask_T[: len(prompt)] = False
        item.loss_mask_T[len(prompt)] = True
    return made


def gradients(
    policy: Policy, objective: Objective, budget: int, share: bool
) -> tuple[float, dict[str, torch.Tensor], int]:
    learner = Learner(policy, OptimOptions(lr=1e-30, clip=0.0), token_budget=budget, total_steps=2, share_prompts=share)
    items = [replace(item, token_fields=dict(item.token_fields)) for item in answers()]
    for item, scores in zip(items, learner.score(items), strict=True):
        item.token_fields["old"] = np.zeros(len(item))
        item.token_fields["old"][item.loss_mask_T] = scores
        item.token_fields["sampler_logprobs"] = item.token_fields["old"] + 0.01
    grads: dict[str, torch.Tensor] = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: grads.__setitem__(name, p.grad.clone()))
        for name, parameter in policy.parameters().items()
    ]
    report = learner.step(items, objective)
    for hook in hooks:
        hook.remove()
    return report.loss, grads, report.packs


# Every objective, and one of each scope for the other ways to train, of which an objective knows nothing.
FEW = ("policy_clip", "nll_sequence", "dpo", "mixed_batch")
CASES = [*(("full", name) for name in OBJECTIVES), *((kind, name) for kind in ("lora", "recomputed") for name in FEW)]


@pytest.mark.parametrize(("policy", "name"), CASES, indirect=["policy"])
def test_loss_and_gradient_do_not_change(policy: Policy, name: str) -> None:
    objective = OBJECTIVES[name]()
    loss, grads, packs = gradients(policy, objective, 10**6, share=False)
    for budget in (10**6, 90):
        shared_loss, shared, fewer = gradients(policy, objective, budget, share=True)
        assert shared_loss == pytest.approx(loss, rel=EXACT, abs=1e-12)
        assert shared.keys() == grads.keys() and (packs == 1)
        size = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
        for key, grad in grads.items():
            assert relative(shared[key], grad, floor=1e-3 * size) < EXACT, key
    assert fewer > 1


def test_scores_do_not_change(policy: Policy) -> None:
    plain, shared = (
        Learner(policy, OptimOptions(), token_budget=100, total_steps=1, share_prompts=share).score(
            answers(), output="values"
        )
        for share in (False, True)
    )
    for mine, other in zip(shared, plain, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("act", ["step", "score"])
def test_running_out_of_memory_takes_apart_what_shares_a_prompt(act: str) -> None:
    """Written out, the sequences of such a pack are longer than the budget; in the pack they are not."""
    policy = in_float64(tiny_policy())
    items = [item for item in answers() if item.loss_mask_T.any()]
    compute, seen = policy.outputs, []

    def guarded(batch: TokenBatch, *args: Any, **kwargs: Any) -> Any:
        seen.append(batch.tokens)
        assert len(seen) < 50, "the same packs are tried for ever"
        if batch.tokens > 100:
            raise torch.OutOfMemoryError("injected")
        return compute(batch, *args, **kwargs)

    policy.outputs = guarded  # type: ignore[method-assign]
    budget = shared_size(items, range(len(items)))
    assert budget < sum(len(item) for item in items)
    learner = Learner(policy, OptimOptions(lr=1e-30), token_budget=budget, total_steps=2, share_prompts=True)
    done = learner.step(items, OBJECTIVES["nll_token"]()) if act == "step" else learner.score(items)
    assert done and learner.token_budget < budget


def test_a_shared_prompt_is_there_once_and_predicts_every_first_token() -> None:
    items = answers()
    pack = TokenBatch.build(items, range(len(items)), CPU, torch.float64, share=True)
    whole = TokenBatch.build(items, range(len(items)), CPU, torch.float64)
    assert pack.tokens == shared_size(items, range(len(items))) < whole.tokens
    assert pack.trained_tokens == whole.trained_tokens
    for sequence, index in enumerate(pack.index_B):
        mine = pack.sequence_N == sequence
        chosen = np.flatnonzero(items[index].loss_mask_T)
        assert pack.ids_T[pack.targets_N[mine]].tolist() == items[index].ids_T[chosen].tolist()
        assert pack.ids_T[pack.sources_N[mine]].tolist() == items[index].ids_T[chosen - 1].tolist()
        assert pack.positions_T[pack.sources_N[mine]].tolist() == (chosen - 1).tolist()


@pytest.mark.parametrize("scope", ["token", "pair"])
@pytest.mark.parametrize("budget", [1, 60, 90, 200, 10**6])
def test_every_sequence_is_in_one_pack_and_packs_hold_the_budget(budget: int, scope: str) -> None:
    items = answers()
    packs = plan_packs(items, budget, scope, share=0.2)  # type: ignore[arg-type]
    assert sorted(index for pack in packs for index in pack) == list(range(len(items)))
    for pack in packs:
        groups = {items[i].group_id for i in pack} if scope == "pair" else set(pack)
        assert shared_size(items, pack, 0.2) <= budget or len(groups) == 1
        if scope == "pair":
            assert all((items[i].group_id in groups) == (i in pack) for i in range(len(items)))


def test_written_out_keys_stay_within_the_memory_that_a_budget_stands_for() -> None:
    """8 prompts of 4,096 tokens with 64 answers of 64 each, at the shape of a 7B model and a budget of 65,536 rows:
    with rows alone, one pack would write out more than two million tokens."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 1000, (8, 4096))
    items = [
        Trajectory(np.concatenate([prompt, rng.integers(0, 1000, 64)]), np.arange(4160) >= 4096)
        for prompt in prompts
        for _ in range(64)
    ]
    shape = USUAL[7.0]
    for by_kernel in (True, False):
        written = 2 * shape.kv_width if by_kernel else 6 * shape.query_width
        packs = plan_packs(items, 65536, "token", share=shape.spread_cost(by_kernel))
        assert sorted(index for pack in packs for index in pack) == list(range(len(items)))
        for pack in packs:
            rows, tokens = shared_size(items, pack), sum(len(items[i]) for i in pack)
            assert rows * shape.block_width() + (tokens - rows) * written <= 65536 * shape.block_width()
    assert shared_size(items, range(len(items))) == 65536


def test_the_cost_of_what_is_written_out() -> None:
    policy = tiny_policy()
    shape, config = Shape.of_tiny(SHAPE), policy.backbone.config
    by_kernel = spread_cost(config, torch.bfloat16, torch.device("cuda"))
    assert by_kernel == 2 * 16 / (4 * 32 + 2 * 32 + 2 * 16 + 2 * 48) == shape.spread_cost(by_kernel=True)
    for kind, device in ((torch.float32, "cuda"), (torch.bfloat16, "cpu")):
        assert spread_cost(config, kind, torch.device(device)) == shape.spread_cost(by_kernel=False) == 6 * 32 / 320
    wide = AutoConfig.for_model("qwen2", intermediate_size=10**6)
    assert spread_cost(wide, torch.bfloat16, torch.device("cuda")) == LEAST_COST
    mixture = AutoConfig.for_model("qwen3_moe")
    assert spread_cost(mixture, torch.bfloat16, torch.device("cuda")) == USUAL_COST


def test_gradients_of_unequal_families_are_added_up_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """One short prompt that many read beside a long one that two read; summed in pieces of a few rows."""
    gathered: list[int] = []
    lengths, readers = (3, 50), (40, 2)
    rows = np.concatenate([np.arange(3)] * 40 + [np.arange(3, 53)] * 2 + [np.arange(53, 60)])
    sharing = Sharing.of(rows, lambda array: torch.from_numpy(np.ascontiguousarray(array)))
    x = torch.randn(60, 2, 3, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(len(rows), 2, 3, dtype=torch.float64)
    wanted = torch.zeros(60, 2, 3, dtype=torch.float64).index_add(0, torch.from_numpy(rows), pull)
    select = torch.Tensor.index_select

    def counted(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        gathered.append(len(index))
        return select(self, dim, index)

    for limit in (2**28, 100 * 6 * 8):
        monkeypatch.setattr(sharing_module, "SUM_BYTES", limit)
        spread = sharing.spread(x)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "index_select", counted)
            (found,) = torch.autograd.grad(spread, x, pull)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert gathered[:3] == [7, 2 * 50, 3 * 40] and max(gathered[3:]) <= 100
    assert sum(gathered[3:]) == len(rows) == sum(n * m for n, m in zip(lengths, readers, strict=True)) + 7


def test_prompts_that_are_short_or_learnt_are_not_shared() -> None:
    items = answers()
    for family in families(items, range(len(items))):
        if len(family) > 1:
            first = items[family[0]].ids_T[:SHORTEST]
            assert all((items[i].ids_T[:SHORTEST] == first).all() for i in family)
            assert not any(items[i].loss_mask_T[:SHORTEST].any() for i in family)


def test_a_convolution_over_tokens_refuses_to_share() -> None:
    assert can_share(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert not can_share(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Conv1d(2, 2, 3)))


def test_values_of_a_critic_do_not_change() -> None:
    from lemma.models.critic import build_critic
    from lemma.models.model_options import ModelOptions

    critic: Critic = build_critic(ModelOptions(tiny=SHAPE), CPU, 0, None)
    plain, shared = (
        Learner(critic, OptimOptions(), token_budget=100, total_steps=1, share_prompts=share).score(
            answers(), output="values"
        )
        for share in (False, True)
    )
    for mine, other in zip(shared, plain, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
