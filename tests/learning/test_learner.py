"""Running out of memory, dropout, precisions, 4-bit base weights and compiled blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.utils
import transformers

from lemma.core.errors import UserError
from lemma.core.random import key
from lemma.core.types import Trajectory
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.load_model import build_policy
from lemma.models.model_options import LoraOptions, ModelOptions
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy
from lemma.models.tiny import tiny_tokenizer
from lemma.objectives import LossInputs, NegativeLogLikelihood, Objective, Totals
from tests.models.small import CPU, SHAPE, WORDS, in_float64, relative, tiny_policy, trajectories
from tests.objectives.toys import TOYS

LENGTHS = (7, 31, 5, 12, 2, 40, 19, 19, 3, 26)


def learner_of(policy: Policy, budget: int = 64, **options: Any) -> Learner:
    return Learner(policy, OptimOptions(lr=1e-2), token_budget=budget, total_steps=8, **options)


def run_out(policy: Policy, size: int, after: int = 0) -> list[int]:
    """Make every forward of more than `size` tokens fail as a full GPU does, once `after` forwards went well."""
    seen: list[int] = []
    compute = policy.outputs

    def guarded(batch: TokenBatch, *args: Any, **kwargs: Any) -> Any:
        seen.append(batch.tokens)
        if batch.tokens > size and len(seen) > after:
            raise torch.OutOfMemoryError("injected")
        return compute(batch, *args, **kwargs)

    policy.outputs = guarded  # type: ignore[method-assign]
    return seen


# --- out of memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nll", "toy_pair", "toy_batch"])
def test_out_of_memory_halves_the_budget_and_repeats_with_the_same_loss(name: str) -> None:
    objective: Objective = NegativeLogLikelihood() if name == "nll" else TOYS[name]
    reports, weights, said = [], [], []
    for scarce in (False, True):
        policy = in_float64(tiny_policy())
        learner = learner_of(policy, 128, say=said.append)
        if scarce:
            run_out(policy, 55)
        reports.append(learner.step(trajectories(LENGTHS), objective))
        weights.append([p.detach().clone() for p in policy.parameters().values()])
    assert learner.token_budget == 32
    assert said == [f"out of memory: the token budget is now {b}; repeating with the same loss" for b in (64, 32)]
    assert reports[1].packs > reports[0].packs
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-12)
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-12)
    for enough, little in zip(*weights, strict=True):
        assert relative(little, enough) < 1e-12


def test_running_out_in_the_second_pass_of_a_batch_objective() -> None:
    """The scores of the first pass are thrown away and made again with the smaller packs."""
    losses = []
    for scarce in (False, True):
        policy = in_float64(tiny_policy())
        learner = learner_of(policy, 200)
        if scarce:
            seen = run_out(policy, 100, after=1)
        losses.append(learner.step(trajectories(LENGTHS), TOYS["toy_batch"]))
    assert learner.token_budget == 100 and seen[:2] == [164, 164]
    assert losses[1].grad_norm == pytest.approx(losses[0].grad_norm, rel=1e-12)


def test_what_was_added_up_before_running_out_is_forgotten() -> None:
    """The first pack goes well, the second does not: the first must not count twice."""
    norms = []
    for scarce in (False, True):
        policy = in_float64(tiny_policy())
        learner = learner_of(policy, 40)
        if scarce:
            seen = run_out(policy, 25, after=1)
        norms.append(learner.step(trajectories((20, 20, 15, 15)), NegativeLogLikelihood()).grad_norm)
    assert seen == [40, 30, 20, 20, 15] and learner.token_budget == 20
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)


def test_scoring_and_evaluating_shrink_as_well() -> None:
    items = trajectories(LENGTHS)
    results = []
    for scarce in (False, True):
        said: list[str] = []
        policy = in_float64(tiny_policy())
        learners = [learner_of(policy, 128, say=said.append) for _ in range(3)]
        seen = run_out(policy, 60) if scarce else []
        scores = learners[0].score(items)
        results.append(
            (
                scores,
                learners[1].evaluate(items, NegativeLogLikelihood()),
                learners[2].evaluate(items, TOYS["toy_batch"]),
            )
        )
    assert [learner.token_budget for learner in learners] == [32] * 3 and len(said) == 6
    assert max(seen) > 60
    for enough, little in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_allclose(little, enough, rtol=1e-12)
    for i in (1, 2):
        assert results[1][i] == pytest.approx(results[0][i], rel=1e-12)


@pytest.mark.parametrize("act", ["step", "score", "evaluate"])
def test_a_single_sequence_that_does_not_fit(act: str) -> None:
    """Though the others would: short ones that share a pack for ever must not make it try for ever."""
    policy = tiny_policy()
    learner = learner_of(policy, 64)
    run_out(policy, 39)
    items = trajectories((40, *[2] * 30))
    work: dict[str, Callable[[], object]] = {
        "step": lambda: learner.step(items, NegativeLogLikelihood()),
        "score": lambda: learner.score(items),
        "evaluate": lambda: learner.evaluate(items, NegativeLogLikelihood()),
    }
    with pytest.raises(UserError, match="a single sequence of 40 tokens does not fit into memory; write"):
        work[act]()


def test_a_single_pair_that_does_not_fit() -> None:
    policy = tiny_policy()
    run_out(policy, 39)
    with pytest.raises(UserError, match="a single pair of sequences of 45 tokens does not fit"):
        learner_of(policy).step(trajectories((22, 23, 4, 4)), TOYS["toy_pair"])


def test_no_memory_for_the_optimiser() -> None:
    learner = learner_of(tiny_policy())

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("injected")

    learner.optimiser.inner.step = full  # type: ignore[method-assign]
    with pytest.raises(UserError, match="the state of the optimiser does not fit into memory; use"):
        learner.step(trajectories((9, 9)), NegativeLogLikelihood())


# --- what a step says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there", "kept"), [(64, 32, 32), (32, 32, 32), (32, 64, 32)])
def test_a_learner_that_goes_on_keeps_its_budget_where_it_fits(here: int, there: int, kept: int) -> None:
    said: list[str] = []
    state = learner_of(tiny_policy(), there).state()
    learner = learner_of(tiny_policy(), here, say=said.append)
    learner.load(*state)
    assert learner.token_budget == kept
    assert said == ["the token budget was 64, and 32 fit here: from now on sums are rounded otherwise"] * (here < there)


def test_the_report() -> None:
    learner = learner_of(tiny_policy())
    items = trajectories((7, 30, 12))
    report = learner.step(items, NegativeLogLikelihood())
    assert (report.tokens, report.packs, report.updated, report.lr) == (49, 1, True, 1e-2)
    assert report.trained_tokens == sum(int(t.loss_mask_T.sum()) for t in items)
    assert report.metrics["nll"] == pytest.approx(report.loss, rel=1e-6)
    assert learner.step_count == 1


def test_a_gradient_that_is_no_number_is_said() -> None:
    said: list[str] = []
    policy = tiny_policy()
    learner = learner_of(policy, say=said.append)
    with torch.no_grad():
        policy.causal.model.norm.weight[0] = float("nan")
    before = policy.head.weight.detach().clone()
    report = learner.step(trajectories((9, 9)), NegativeLogLikelihood())
    assert not report.updated and math.isnan(report.grad_norm)
    assert said == ["step 1: the gradient is not finite; the weights stay as they were"]
    assert torch.equal(policy.head.weight, before)


def test_scores_belong_to_their_trajectories() -> None:
    policy = in_float64(tiny_policy())
    items = trajectories(LENGTHS)
    together = learner_of(policy, 50).score(items)
    assert [len(scores) for scores in together] == [t.trained_tokens for t in items]
    for item, scores in zip(items, together, strict=True):
        np.testing.assert_allclose(learner_of(policy).score([item])[0], scores, rtol=1e-12)
        assert (scores < 0).all()


@pytest.mark.parametrize("lora", [False, True])
def test_what_is_scored_before_an_update_is_what_the_update_finds_to_the_last_bit(lora: bool) -> None:
    """So that the ratio of a first update is 1 and its KL 0, whatever order a CPU adds in."""
    learner = learner_of(tiny_policy(lora))
    items = trajectories(LENGTHS)
    for item, scores in zip(items, learner.score(items), strict=True):
        item.token_fields["sampler_logprobs"] = np.zeros(len(item))
        item.token_fields["sampler_logprobs"][item.loss_mask_T] = scores
    report = learner.step(items, NegativeLogLikelihood())
    assert report.packs > 1 and report.metrics["mismatch/max"] == 0.0


def test_evaluating_nothing() -> None:
    learner = learner_of(tiny_policy())
    assert learner.evaluate([], NegativeLogLikelihood()) == {"loss": 0.0}
    assert learner.evaluate([], TOYS["toy_batch"]) == {"loss": 0.0}
    assert learner.score([]) == []


# --- dropout ---------------------------------------------------------------------------------------------------------


def with_dropout() -> Learner:
    return learner_of(tiny_policy(lora=LoraOptions(r=3, dropout=0.3)), 40, seed=5)


def losses(learner: Learner, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        torch.randn(learner.step_count + 1)  # whoever else draws random numbers must not matter
        found.append(learner.step(trajectories((20, 15, 9, 31)), NegativeLogLikelihood()).loss)
    return found


def test_dropout_repeats_and_goes_on_to_the_last_bit() -> None:
    first, second = with_dropout(), with_dropout()
    torch.manual_seed(1)
    through = losses(first, 4)
    torch.manual_seed(2)
    assert losses(second, 2) == through[:2]
    tensors, extra = second.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    resumed = with_dropout()
    resumed.load(tensors, json.loads(json.dumps(extra)))
    assert losses(resumed, 2) == through[2:]
    for a, b in zip(first.policy.parameters().values(), resumed.policy.parameters().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["seed_oss", "starcoder2"])
def test_dropout_that_layers_call_themselves_repeats_too(kind: str) -> None:
    from tests.models.families import family_policy

    found = []
    for seed in (1, 2):
        learner = learner_of(family_policy(kind, {"residual_dropout": 0.3}), 40, seed=5, share_prompts=True)
        assert not learner.shares, "the answers to one prompt would see the same chance"
        torch.manual_seed(seed)
        found.append(losses(learner, 2))
    assert found[0] == found[1]


def test_dropout_differs_from_step_to_step_and_is_off_when_scoring() -> None:
    learner = with_dropout()
    learner.optim = OptimOptions(lr=0.0)
    first, second = losses(learner, 2)
    assert first != second
    items = trajectories((20, 15, 9, 31))
    still = [learner.evaluate(items, NegativeLogLikelihood())["loss"] for _ in range(2)]
    assert still[0] == still[1] != first
    assert all((a == b).all() for a, b in zip(learner.score(items), learner.score(items), strict=True))


def test_dropout_is_on_again_after_scoring() -> None:
    items = trajectories((20, 15, 9, 31))
    plain, scored = with_dropout(), with_dropout()
    scored.score(items)
    assert losses(scored, 1) == losses(plain, 1)


def test_a_batch_objective_sees_the_same_dropout_in_both_passes() -> None:
    """With one pack the two passes are one plain backward; a learner that drew again would find another gradient."""
    items = trajectories((20, 15, 9, 31))
    learner, plain = with_dropout(), with_dropout().policy
    learner.token_budget = 1000
    norm = learner.step(items, TOYS["toy_batch"]).grad_norm
    batch = TokenBatch.build(items, [0, 1, 2, 3], CPU, torch.float32)
    plain.module.train()
    torch.manual_seed(key(5, "dropout", 0, 0, 0))
    outputs = plain.outputs(batch, ("logprobs", "entropy"))
    terms = LossInputs(outputs, batch.sequence_N, batch.group_B, Totals.of(items), {}, batch.fields)
    TOYS["toy_batch"](terms).value.backward()
    grads = [p.grad for p in plain.parameters().values() if p.grad is not None]
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-5)


# --- precisions ------------------------------------------------------------------------------------------------------


def sequences(count: int = 6, length: int = 24) -> list[Trajectory]:
    rng = np.random.default_rng(3)
    return [Trajectory(rng.integers(0, WORDS, length), np.arange(length) > 3) for _ in range(count)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_with_weights_in_their_place(precision: str) -> None:
    policy = tiny_policy(precision=precision)
    learner = learner_of(policy)
    addresses = {name: p.data_ptr() for name, p in policy.parameters().items()}
    found = [learner.step(sequences(), NegativeLogLikelihood()) for _ in range(8)]
    assert all(report.updated for report in found)
    assert found[-1].loss < found[0].loss - 0.3
    assert {name: p.data_ptr() for name, p in policy.parameters().items()} == addresses
    for name, master in learner.optimiser.masters.items():
        assert torch.equal(master.to(policy.parameters()[name].dtype), policy.parameters()[name])
    _, extra = learner.state()
    assert extra["optimiser"]["scaler"]["scale"] == (65536.0 if precision == "fp16" else 1.0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=500.0,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_four_bit_base_weights_learn_through_their_adapter(llama: Path, tmp_path: Path) -> None:
    """bitsandbytes for real. The merged model is the original base with the adapter, overrides included."""
    options = ModelOptions(
        path=str(llama), quantize="4bit", lora=LoraOptions(r=4, alpha=16), override={"rope_theta": 3000.0}
    )
    policy = build_policy(options, CPU, 0)
    layer = policy.causal.model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.dtype == torch.uint8 and layer.weight.numel() == 64 * 128 // 2
    learner = learner_of(policy)
    found = [learner.step(sequences(), NegativeLogLikelihood()).loss for _ in range(8)]
    assert found[-1] < found[0] - 0.1
    policy.save(tmp_path)

    ids = torch.arange(3, 43)[None]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not getattr(merged, "is_quantized", False)
    assert merged.config.rope_parameters["rope_theta"] == 3000.0
    whole = build_policy(options.model_copy(update={"quantize": None}), CPU, 0)
    with torch.no_grad():
        for name, parameter in whole.parameters().items():
            parameter.copy_(policy.parameters()[name])
        expected = whole.module.eval()(input_ids=ids).logits
        torch.testing.assert_close(merged.eval()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        rounded = policy.module.eval()(input_ids=ids).logits
    assert 1e-4 < (rounded - expected).abs().max().item() < 1.0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        llama
    )


def test_compiled_blocks_give_the_same_loss_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once for all packs, whatever their lengths. The graphs run as they are, without a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()  # another test of this process may have compiled the same blocks
    torch._dynamo.utils.counters.clear()
    packs = [(20, 9, 14), (5, 6, 7, 30), (40, 3), (33,)]
    found, graphs = {}, []
    for compiled in (False, True):
        policy = build_policy(ModelOptions(tiny=SHAPE.model_copy(update={"layers": 1})), CPU, 0)
        learner = learner_of(policy, compile_blocks=compiled)
        before = [layer.__dict__.get("forward") for layer in policy.backbone.layers]
        found[compiled] = []
        for lengths in packs:
            step = learner.step(trajectories(lengths), NegativeLogLikelihood())
            found[compiled].append((step.loss, step.grad_norm))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            assert [layer.__dict__.get("forward") for layer in policy.backbone.layers] == before
    assert np.array(found[True]) == pytest.approx(np.array(found[False]), rel=1e-4)
    none, some = set(graphs[: len(packs)]), set(graphs[len(packs) :])
    assert none == {0} and len(some) == 1 and min(some) >= 1
