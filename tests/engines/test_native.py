"""The native engine against transformers' own generation and against the learner, and its weights over time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lemma.engines.protocol import Request, generate
from tests.engines.native_checks import FREE, GREEDY, check_same, engine_of, ids_of, requests_of, run
from tests.engines.small_policies import (
    ARCHITECTURES,
    FLOAT32,
    exact_policy,
    learner_logprobs,
    random_prompts,
    shake,
    small_policy,
    worst_difference,
)


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_tokens_equal_generate_and_logprobs_equal_the_learner(kind: str, lora: int) -> None:
    """The window of Mistral and Gemma, 16 tokens, is shorter than the sequences."""
    policy = exact_policy(kind, lora=lora)
    requests = requests_of(random_prompts(5), replace(GREEDY, max_tokens=20))
    found = run(policy, requests)
    assert worst_difference(policy, requests, found) < 1e-5
    for request, completion in zip(requests, found, strict=True):
        theirs = policy.causal.generate(
            torch.from_numpy(request.prompt)[None], do_sample=False, max_new_tokens=20, eos_token_id=-1
        )[0, len(request.prompt) :]
        assert completion.ids.tolist() == theirs.tolist()


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_sampled_logprobs_equal_the_learner_at_the_temperature(kind: str, lora: int) -> None:
    """Chunks, blocks and bursts of other sizes than the ones by which the sequences are long."""
    policy = small_policy(kind, lora=lora, seed=2)
    requests = requests_of(random_prompts(4, seed=1, longest=60), replace(FREE, temperature=0.7, max_tokens=19))
    found = run(policy, requests, prefill_tokens=13, burst=5)
    assert worst_difference(policy, requests, found, temperature=0.7) < FLOAT32


def test_tied_weights_and_a_head_with_a_bias() -> None:
    tied = exact_policy(tied=True)
    biased = exact_policy()
    biased.head.bias = torch.nn.Parameter(torch.randn(biased.head.weight.shape[0]))
    for policy in (tied, biased):
        requests = requests_of(random_prompts(3), FREE)
        assert worst_difference(policy, requests, run(policy, requests)) < 1e-5


def test_an_optimiser_step_between_two_calls_is_seen() -> None:
    """All weights are the learner's own; the prompts are the same, so what was cached of them must not be used."""
    policy = small_policy()
    requests = requests_of(random_prompts(4, longest=60), GREEDY)
    engine = engine_of(policy)
    before = generate(engine, requests)
    optimiser = torch.optim.SGD(policy.module.parameters(), lr=5.0)
    policy.module.train()
    for request in requests:
        ids = torch.from_numpy(request.prompt)[None]
        policy.causal(input_ids=ids, labels=ids).loss.backward() if ids.shape[1] > 1 else None
    optimiser.step()
    engine.update_weights(7)
    after = generate(engine, requests)
    assert ids_of(before) != ids_of(after)
    assert worst_difference(policy, requests, after) < FLOAT32
    assert {c.policy_version for c in before} == {0}
    assert {c.policy_version for c in after} == {7}


def test_a_step_that_is_not_announced_gives_old_blocks_so_the_test_above_can_fail() -> None:
    policy = exact_policy()
    prompt = np.arange(1, 41)
    requests = requests_of([prompt], FREE)
    engine = engine_of(policy)
    generate(engine, requests)
    shake(policy, 1, size=0.05)
    assert worst_difference(policy, requests, generate(engine, requests)) > 1e-2
    engine.update_weights(1)
    assert worst_difference(policy, requests, generate(engine, requests)) < 1e-5


@pytest.mark.parametrize("lora", [0, 4])
def test_new_weights_in_the_middle_use_no_old_cache(lora: int) -> None:
    """What is unfinished goes on with the new weights, as in the other engines; its version is the oldest it has."""
    policy = exact_policy(lora=lora)
    prompt = np.arange(1, 41)
    engine = engine_of(policy, burst=1, max_sequences=2)
    engine.submit(Request(("a",), prompt, replace(GREEDY, max_tokens=4)))
    engine.submit(Request(("b",), prompt, replace(GREEDY, max_tokens=9)))
    engine.submit(Request(("c",), prompt, replace(GREEDY, max_tokens=3)))
    stream = engine.completions()
    first = next(stream)
    shake(policy, 1, size=0.1)
    engine.update_weights(1)
    second, third = sorted(stream, key=lambda c: c.order)
    assert second.ids[:4].tolist() == first.ids.tolist()
    assert [first.policy_version, second.policy_version, third.policy_version] == [0, 0, 1]
    assert [first.spans, second.spans, third.spans] == [(), ((0, 0), (4, 1)), ()]
    expected = learner_logprobs(policy, prompt, second.ids)[4:]
    assert np.abs(expected - second.logprobs[4:]).max() < 1e-5, "as a plain forward under the new weights"
    whole = np.concatenate([prompt, second.ids])
    logits = policy.causal(torch.from_numpy(whole)[None]).logits[0]
    assert logits[len(prompt) + 4 - 1 : -1].argmax(-1).tolist() == second.ids[4:].tolist()
    assert np.abs(learner_logprobs(policy, prompt, third.ids) - third.logprobs).max() < 1e-5


def test_weights_that_moved_in_memory_are_found() -> None:
    """As after an offload: every parameter has a new place; joint projections read the new one as well."""
    policy = exact_policy()
    requests = requests_of(random_prompts(3, longest=60), FREE)
    engine = engine_of(policy)
    before = generate(engine, requests)
    for parameter in policy.module.parameters():
        parameter.data = parameter.data.clone()
    check_same(generate(engine, requests), before)
    shake(policy, 1, size=0.05)
    engine.update_weights(1)
    assert worst_difference(policy, requests, generate(engine, requests)) < 1e-5


def test_a_single_weight_that_moved_is_found() -> None:
    """Joint projections read all their weights where these are now, not only the first."""
    policy = exact_policy()
    request = Request(("a",), np.arange(1, 41), GREEDY)
    engine = engine_of(policy)
    before = generate(engine, [request])
    for layer in (policy.backbone.layers[0].self_attn.v_proj, policy.backbone.layers[1].mlp.up_proj):
        layer.weight.data = layer.weight.data * -1.0
    engine.invalidate()
    (after,) = generate(engine, [request])
    whole = np.concatenate([request.prompt, after.ids])
    logits = policy.causal(torch.from_numpy(whole)[None]).logits[0, 39:-1]
    assert logits.requires_grad, "with gradients every projection stands for itself"
    assert logits.argmax(-1).tolist() == after.ids.tolist() != before[0].ids.tolist()


def test_a_policy_that_is_set_to_train_between_completions_is_set_to_evaluate_again() -> None:
    policy = exact_policy()
    policy.module.train()
    engine = engine_of(policy, burst=1)
    prompts = random_prompts(2)
    for i, length in enumerate((2, 6)):
        engine.submit(Request((i,), prompts[i], replace(FREE, max_tokens=length)))
    stream = engine.completions()
    next(stream)
    policy.module.train()
    assert len(list(stream)) == 1
    assert not policy.module.training and not policy.backbone.layers[0].training


def test_dropout_does_not_speak() -> None:
    policy = exact_policy(lora=4)
    for module in policy.module.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    policy.module.train()
    requests = requests_of(random_prompts(3), FREE)
    found = run(policy, requests)
    assert worst_difference(policy, requests, found) < 1e-5


def test_bfloat16_stays_near_the_learner() -> None:
    policy = small_policy(dtype=torch.bfloat16)
    requests = requests_of(random_prompts(4), FREE)
    found = run(policy, requests)
    differences = np.concatenate(
        [np.abs(learner_logprobs(policy, r.prompt, c.ids) - c.logprobs) for r, c in zip(requests, found, strict=True)]
    )
    assert 0 < differences.mean() < 0.1
