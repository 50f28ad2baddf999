"""How an update is fitted into a GPU: large packs first, then as little recomputation as possible."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lemma.core.ranks import RankWorld, joined
from lemma.learning.learning_options import BudgetOptions, OptimOptions
from lemma.models.fitting import ALONE, SHARE, USUAL, UpdateFit, fit_update, host_budget
from lemma.models.memory import GIB, Shape, plan_training
from lemma.models.model_options import LoraOptions, ModelOptions
from lemma.models.packing import TokenBatch
from lemma.runs.fitted import fit_budget
from lemma.runs.run_options import StageOptions
from tests.models.small import CPU, tiny_policy, trajectories

SMALL, MIDDLE, LARGE = USUAL[0.5], USUAL[1.5], USUAL[7.0]
MODEL = ModelOptions(path="x")


def planned(fit: UpdateFit, **options: object) -> float:
    return plan_training(MIDDLE, MODEL, "bf16", fit.token_budget, recomputed=fit.recomputed, **options).total  # type: ignore[arg-type]


def test_a_large_gpu_takes_large_packs_and_recomputes_nothing() -> None:
    assert fit_update(MIDDLE, MODEL, "bf16", 140 * GIB) == UpdateFit(32768, 0)
    assert fit_update(SMALL, MODEL, "bf16", 140 * GIB) == UpdateFit(65536, 0)


def test_as_few_blocks_as_fit_are_recomputed() -> None:
    memory = 50 * GIB
    fit = fit_update(MIDDLE, MODEL, "bf16", memory, token_budget=16384)
    assert 0 < fit.recomputed < MIDDLE.layers
    fewer = UpdateFit(16384, fit.recomputed - 1)
    assert planned(fit) <= ALONE * memory < planned(fewer)


def test_what_the_options_say_stays() -> None:
    asked = MODEL.model_copy(update={"checkpointing": True})
    assert fit_update(SMALL, asked, "bf16", 140 * GIB).recomputed == SMALL.layers
    refused = MODEL.model_copy(update={"checkpointing": False})
    assert fit_update(LARGE, refused, "bf16", 24 * GIB, token_budget=4096) == UpdateFit(4096, 0)
    assert fit_update(SMALL, MODEL, "bf16", 140 * GIB, token_budget=5000) == UpdateFit(5000, 0)


def test_an_engine_a_critic_and_a_reference_leave_less() -> None:
    alone = fit_update(MIDDLE, MODEL, "bf16", 80 * GIB)
    for other in ({"with_engine": True}, {"critic": True}, {"reference": True}):
        fit = fit_update(MIDDLE, MODEL, "bf16", 80 * GIB, **other)
        assert (fit.token_budget, -fit.recomputed) <= (alone.token_budget, -alone.recomputed)
    assert fit_update(MIDDLE, MODEL, "bf16", 80 * GIB, critic=True) != alone


def test_a_critic_takes_its_state_and_not_the_memory_of_a_second_pass() -> None:
    """PPO at 1.5B on a GPU of 140 GiB, beside an engine: nothing has to be computed twice."""
    shape = Shape(28, 1536, 1536, 256, 8960, 151936, True)
    both = {"with_engine": True, "critic": True, "reference": True}
    assert fit_update(shape, MODEL, "bf16", 139.8 * GIB, **both) == UpdateFit(16384, 0)


def test_sums_of_slots_leave_less() -> None:
    fit = fit_update(MIDDLE, MODEL, "bf16", 60 * GIB, slots=4)
    assert planned(fit, slots=4) <= ALONE * 60 * GIB < planned(fit_update(MIDDLE, MODEL, "bf16", 60 * GIB), slots=4)


def test_a_cpu_takes_smaller_packs_and_recomputes_nothing() -> None:
    shape, adapters = Shape(30, 576, 576, 192, 1536, 49152, True), MODEL.model_copy(update={"lora": LoraOptions()})
    budgets = {gib: host_budget(shape, adapters, "fp32", gib * GIB) for gib in (2, 8, 12, 20, 32, 128)}
    assert sorted(budgets.values()) == list(budgets.values())
    assert (budgets[2], budgets[128]) == (2048, 16384) and len(set(budgets.values())) == 4
    for gib, budget in budgets.items():
        total = plan_training(shape, adapters, "fp32", budget, on_cpu=True).total
        assert budget == 2048 or total <= SHARE * gib * GIB
    whole = host_budget(shape, MODEL, "fp32", 20 * GIB)
    assert host_budget(shape, MODEL, "fp32", 20 * GIB, critic=True) < whole


def test_where_nothing_fits_the_smallest_is_taken() -> None:
    assert fit_update(LARGE, MODEL, "bf16", 24 * GIB) == UpdateFit(2048, LARGE.layers)
    adapters = MODEL.model_copy(update={"lora": LoraOptions()})
    assert fit_update(LARGE, adapters, "bf16", 24 * GIB).token_budget >= 4096


def test_packs_stay_usual_where_the_state_itself_leaves_an_engine_less() -> None:
    fit = fit_update(LARGE, MODEL, "bf16", 120 * GIB, with_engine=True, moments=2.03)
    assert fit == UpdateFit(16384, LARGE.layers)
    assert fit_update(LARGE, MODEL, "bf16", 100 * GIB, with_engine=True, moments=2.03).token_budget == 2048


@pytest.mark.parametrize("count", [0, 1, 2])
def test_so_many_blocks_are_computed_twice_and_the_gradient_stays(count: int) -> None:
    policy = tiny_policy()
    policy.module.train()
    policy.recompute(count)
    assert policy.recomputed == count
    calls: list[int] = []
    for number, layer in enumerate(policy.causal.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    batch = TokenBatch.build(trajectories((9, 14)), [0, 1], CPU)
    logprobs = policy.logprobs(batch)
    logprobs.sum().backward()
    assert sorted(calls) == sorted([0, 1, *range(count)])
    plain = tiny_policy()
    plain.module.train()
    plain.logprobs(batch).sum().backward()
    for name, parameter in plain.parameters().items():
        assert torch.equal(parameter.grad, policy.parameters()[name].grad), name  # type: ignore[arg-type]


def test_a_cpu_plans_by_slots_so_that_any_number_of_ranks_computes_the_same_packs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = tiny_policy()
    least = plan_training(Shape.of_config(policy.causal.config.to_dict()), MODEL, "fp32", 2048, on_cpu=True).total
    monkeypatch.setattr("lemma.runs.fitted.host_memory", lambda: 2 * least / SHARE)
    stage: Any = SimpleNamespace(model=MODEL, options=StageOptions(kind="rl"), say=lambda text: None)
    budgets = []
    for slots in (1, 2):
        with joined(RankWorld(slots=slots)):
            budgets.append(fit_budget(stage, policy, BudgetOptions(), OptimOptions(lr=1e-5)))
    assert budgets == [16384, 2048]
