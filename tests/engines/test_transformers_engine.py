"""The reference engine against transformers' own generation and against the learner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lemma.engines.protocol import EngineError, Request, Sampling, generate
from lemma.engines.sampling import cut
from lemma.engines.transformers_engine import TransformersEngine, inverse_cdf
from tests.engines.small_policies import (
    ARCHITECTURES,
    FLOAT32,
    exact_policy,
    random_prompts,
    shake,
    small_policy,
    small_tokenizer,
    worst_difference,
)

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
FREE = Sampling(max_tokens=12, ignore_eos=True)


def requests_of(prompts: list[np.ndarray], sampling: Sampling, n: int = 1) -> list[Request]:
    return [Request(("test", i), prompt, sampling, n) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_tokens_equal_generate_and_logprobs_equal_the_learner(kind: str, lora: int) -> None:
    policy = exact_policy(kind, lora=lora)
    requests = requests_of(random_prompts(5), GREEDY)
    found = generate(TransformersEngine(policy, seed=0), requests)
    assert worst_difference(policy, requests, found) < 1e-5
    for request, completion in zip(requests, found, strict=True):
        theirs = policy.causal.generate(
            torch.from_numpy(request.prompt)[None], do_sample=False, max_new_tokens=12, eos_token_id=-1
        )[0, len(request.prompt) :]
        assert completion.ids.tolist() == theirs.tolist()


def test_a_ragged_batch_of_64_gives_the_tokens_of_64_single_runs() -> None:
    policy = exact_policy()
    requests = requests_of(random_prompts(64), replace(FREE, temperature=0.8))
    together = generate(TransformersEngine(policy, seed=3), requests)
    for request, completion in zip(sorted(requests, key=lambda r: repr(r.key)), together, strict=True):
        (alone,) = generate(TransformersEngine(policy, seed=3), [request])
        assert alone.ids.tolist() == completion.ids.tolist()
        np.testing.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-5)
    assert worst_difference(policy, requests, together, temperature=0.8) < 1e-5


def test_samples_differ_and_depend_on_seed_key_and_sample_only() -> None:
    policy = exact_policy()
    (prompt,) = random_prompts(1)
    ids = lambda seed, key, n: [  # noqa: E731
        tuple(c.ids) for c in generate(TransformersEngine(policy, seed), [Request(key, prompt, FREE, n)])
    ]
    assert ids(0, ("a", 1), 4) == ids(0, ("a", 1), 6)[:4]
    assert len(set(ids(0, ("a", 1), 4) + ids(1, ("a", 1), 4) + ids(0, ("a", 2), 4))) == 12


@pytest.mark.parametrize(
    "change", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"min_tokens": 1}]
)
def test_frequencies_match_exact_probabilities(change: dict[str, float]) -> None:
    """Chi-square over the likelier tokens, at a level that one seed in a thousand would miss."""
    policy = exact_policy(sharp=2.0)
    prompt = random_prompts(1)[0]
    draws = 3000
    sampling = replace(Sampling(max_tokens=1), **change)
    logits = policy.causal(torch.from_numpy(prompt)[None]).logits[0, -1].detach()
    end = policy.tokenizer.eos_token_id
    masked, kept = cut(logits, sampling, (end,) if sampling.min_tokens else ())
    expected = draws * masked.softmax(-1).double().numpy()
    found = generate(TransformersEngine(policy, 0, batch=1000), [Request(("x",), prompt, sampling, draws)])
    counts = np.bincount([c.ids[0] for c in found], minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    likely = expected >= 8
    pairs = [(counts[likely], expected[likely]), ([counts[~likely].sum()], [expected[~likely].sum() + 1e-9])]
    chi = sum(float(((np.array(c) - e) ** 2 / np.array(e)).sum()) for c, e in pairs)
    freedom = int(likely.sum())
    assert chi < freedom + 3.5 * np.sqrt(2 * freedom) + 6, (chi, freedom)
    np.testing.assert_allclose(found[0].kept, kept.item(), atol=1e-5)
    np.testing.assert_allclose(found[0].sampler_logprobs[0], masked.log_softmax(-1)[found[0].ids[0]].item(), atol=1e-5)


def test_inverse_cdf_never_takes_what_was_cut() -> None:
    masked = torch.tensor([[-np.inf, 0.0, -np.inf, 0.0, -np.inf]])
    draws = [
        inverse_cdf(masked, torch.tensor([[u]], dtype=torch.float64)).item() for u in (0.0, 0.49, 0.51, 1 - 2**-53)
    ]
    assert draws == [1, 1, 3, 3]


def test_an_optimiser_step_between_two_calls_is_seen() -> None:
    policy = small_policy()
    requests = requests_of(random_prompts(4), GREEDY)
    engine = TransformersEngine(policy, seed=0)
    before = generate(engine, requests)
    shake(policy, 1, size=0.3)
    engine.update_weights(7)
    after = generate(engine, requests)
    assert [tuple(c.ids) for c in before] != [tuple(c.ids) for c in after]
    assert worst_difference(policy, requests, after) < FLOAT32
    assert {c.policy_version for c in before} == {0}
    assert {c.policy_version for c in after} == {7}


def test_new_weights_in_the_middle_use_no_old_cache() -> None:
    policy = exact_policy()
    (prompt,) = random_prompts(1)
    engine = TransformersEngine(policy, seed=0)
    short, long = replace(GREEDY, max_tokens=4), replace(GREEDY, max_tokens=9)
    engine.submit(Request(("a",), prompt, short))
    engine.submit(Request(("b",), prompt, long))
    stream = engine.completions()
    first = next(stream)
    shake(policy, 1, size=0.3)
    engine.update_weights(1)
    (second,) = list(stream)
    assert second.ids[:4].tolist() == first.ids.tolist()
    whole = np.concatenate([prompt, second.ids])
    logits = policy.causal(torch.from_numpy(whole)[None]).logits[0]
    assert logits[len(prompt) + 4 - 1 : -1].argmax(-1).tolist() == second.ids[4:].tolist()


def test_ends() -> None:
    """End of sequence, stop ids, stop strings, none of them within min_tokens, and the longest length."""
    policy = exact_policy(sharp=1.0)
    tokenizer = small_tokenizer()
    (prompt,) = random_prompts(1)
    free = replace(FREE, max_tokens=60)
    (whole,) = generate(TransformersEngine(policy, seed=5), [Request(("k",), prompt, free)])
    ids = whole.ids.tolist()
    assert whole.finish == "length" and len(ids) == 60
    end = ids[20]
    at = ids.index(end)

    def run(**change: object) -> tuple[list[int], str]:
        request = Request(("k",), prompt, replace(free, **change))
        (completion,) = generate(TransformersEngine(policy, seed=5), [request])
        return completion.ids.tolist(), completion.finish

    assert run(stop_ids=(end,)) == (ids[: at + 1], "stop")
    assert run(max_tokens=at + 1, stop_ids=(end,)) == (ids[: at + 1], "stop")
    begin = next(i for i in range(30, 57) if "\ufffd" not in tokenizer.decode(ids[i : i + 3]))
    text = tokenizer.decode(ids[begin : begin + 3])
    assert text not in tokenizer.decode(ids[: begin + 2])
    assert run(stop=(text,)) == (ids[: begin + 3], "stop")
    longer, finish = run(stop_ids=(end,), min_tokens=at + 1)
    assert len(longer) > at + 1 and end not in longer[: at + 1]
    assert finish in ("stop", "length")


def test_the_context_is_the_longest_length() -> None:
    policy = exact_policy(context=32)
    prompt = np.arange(1, 29)
    (completion,) = generate(TransformersEngine(policy, 0), [Request(("a",), prompt, replace(FREE, max_tokens=99))])
    assert len(completion.ids) == 4 and completion.finish == "length"
    with pytest.raises(EngineError, match="fills the context of 32"):
        TransformersEngine(policy, 0).submit(Request(("a",), np.arange(32), FREE))


def test_cancel_while_waiting_and_while_running() -> None:
    policy = exact_policy()
    engine = TransformersEngine(policy, seed=0, batch=2)
    prompts = random_prompts(4)
    for i, tokens in enumerate((3, 40, 40, 5)):
        engine.submit(Request((i,), prompts[i], replace(FREE, max_tokens=tokens)))
    engine.cancel((2,))
    found = {}
    for completion in engine.completions():
        found[completion.key[0]] = completion
        if completion.key == (0,):
            engine.cancel((1,))
    assert found[2].finish == found[1].finish == "cancelled"
    assert len(found[2].ids) == 0 and 3 <= len(found[1].ids) < 40
    assert found[0].finish == found[3].finish == "length"


def test_requests_may_come_while_others_run() -> None:
    policy = exact_policy()
    engine = TransformersEngine(policy, seed=0)
    prompts = random_prompts(2)
    engine.submit(Request((0,), prompts[0], FREE))
    stream = engine.completions()
    assert next(stream).key == (0,)
    engine.submit(Request((1,), prompts[1], FREE))
    assert [c.key for c in engine.completions()] == [(1,)]


def test_logits_that_are_not_finite_are_one_sentence_and_the_engine_goes_on() -> None:
    policy = exact_policy()
    engine = TransformersEngine(policy, seed=0)
    weight = policy.backbone.embed_tokens.weight.data
    weight[5] = float("nan")
    engine.submit(Request(("bad",), np.array([5, 6]), GREEDY))
    engine.submit(Request(("good",), np.array([7, 8]), replace(GREEDY, max_tokens=2)))
    with pytest.raises(EngineError, match="not finite for request bad"):
        list(engine.completions())
    weight[5] = 0.0
    assert [c.key for c in engine.completions()] == [("good",)]


def test_a_repetition_penalty_makes_repetition_rarer() -> None:
    policy = exact_policy(tied=True)
    prompt = random_prompts(1)[0]
    plain, penalised = (
        generate(TransformersEngine(policy, 0), [Request(("a",), prompt, replace(GREEDY, repetition_penalty=p))])[0]
        for p in (1.0, 2.0)
    )
    theirs = policy.causal.generate(
        torch.from_numpy(prompt)[None], do_sample=False, max_new_tokens=12, repetition_penalty=2.0, eos_token_id=-1
    )[0, len(prompt) :]
    assert penalised.ids.tolist() == theirs.tolist() != plain.ids.tolist()


def test_the_policy_keeps_its_mode() -> None:
    policy = exact_policy()
    policy.module.train()
    generate(TransformersEngine(policy, 0), requests_of(random_prompts(1), GREEDY))
    assert policy.module.training
