"""Nothing depends on what else is in the batch, on the order of requests, on the size of the cache, on chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lemma.engines.native.runner import Runner
from lemma.engines.protocol import Completion, Request, Sampling, generate
from tests.engines.native_checks import FREE, check_at_rest, check_same, engine_of, ids_of, requests_of, run
from tests.engines.small_policies import exact_policy, random_prompts, worst_difference

RAGGED = Sampling(max_tokens=24, temperature=0.8)


def ragged_requests(count: int) -> list[Request]:
    """Prompts and completions of many lengths."""
    prompts = random_prompts(count, seed=4, longest=50)
    return [Request(("r", i), p, replace(RAGGED, max_tokens=1 + 7 * i % 29)) for i, p in enumerate(prompts)]


def test_a_ragged_batch_of_64_gives_the_tokens_of_64_single_runs() -> None:
    policy = exact_policy("qwen3", sharp=1.0)
    requests = ragged_requests(64)
    together = run(policy, requests, seed=3)
    assert {c.finish for c in together} == {"stop", "length"}
    engine = engine_of(policy, seed=3)
    alone = sorted((c for request in requests for c in generate(engine, [request])), key=lambda c: c.order)
    check_same(together, alone)
    assert worst_difference(policy, requests, together, temperature=0.8) < 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_preemption_changes_nothing(kind: str) -> None:
    """A cache for about three sequences, and one that holds the longest sequence and nothing else."""
    policy = exact_policy(kind)
    requests = ragged_requests(16)
    longest = max(len(r.prompt) + r.sampling.max_tokens for r in requests)
    wanted = run(policy, requests)
    for cache_tokens in (240, longest):
        engine = engine_of(policy, cache_tokens=cache_tokens)
        check_same(generate(engine, requests), wanted)
        assert engine.scheduler.preemptions > 0 or cache_tokens == longest
        check_at_rest(engine)


def test_preemption_of_samples_of_one_prompt_changes_nothing() -> None:
    policy = exact_policy()
    prompt = random_prompts(1, seed=1, longest=60)[0]
    requests = [Request(("g",), prompt, replace(FREE, max_tokens=40), n=8)]
    engine = engine_of(policy, cache_tokens=len(prompt) + 160)
    check_same(generate(engine, requests), run(policy, requests))
    assert engine.scheduler.preemptions > 0
    check_at_rest(engine)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_samples_of_a_shared_prompt_equal_separate_ones(length: int) -> None:
    """Prompts that end before, at and after the border of a block (16 tokens)."""
    policy = exact_policy()
    prompt = random_prompts(1, seed=7, longest=60)[0][:length]
    assert len(prompt) == length
    request = Request(("g",), prompt, replace(FREE, max_tokens=20), n=5)
    together = run(policy, [request])
    assert len({tuple(c.ids) for c in together}) == 5
    for settings in ({"share_prefixes": False}, {"max_sequences": 1}, {"max_sequences": 1, "share_prefixes": False}):
        check_same(run(policy, [request], **settings), together)
    assert worst_difference(policy, [request], together) < 1e-5


def test_the_prompt_of_a_group_is_computed_once() -> None:
    policy = exact_policy()
    engine = engine_of(policy)
    seen: list[int] = []
    hidden = policy.hidden_cached
    policy.hidden_cached = lambda ids, *rest: (seen.append(len(ids)), hidden(ids, *rest))[1]
    prompt = np.arange(1, 41)
    generate(engine, [Request(("g",), prompt, replace(FREE, max_tokens=2), n=6)])
    assert seen == [40, 6]
    seen.clear()
    generate(engine, [Request(("h",), prompt, replace(FREE, max_tokens=1), n=6)])
    assert seen == [8], "two full blocks of 16 are found again"


def test_known_beginnings_change_nothing() -> None:
    """A second turn: the first prompt, its completion and more; then the same again, found as far as blocks go."""
    policy = exact_policy()
    first = random_prompts(1, seed=1, longest=60)[0]
    engine = engine_of(policy)
    (answer,) = generate(engine, [Request(("a",), first, replace(FREE, max_tokens=30))])
    second = np.concatenate([first, answer.ids, np.arange(5, 12)])
    requests = [Request(("b",), second, FREE, n=3)]
    found = engine.pool.find(engine.pool.extend([], second))
    assert len(found) * engine.pool.size >= len(first) + 30 - engine.pool.size
    warm = generate(engine, requests)
    assert worst_difference(policy, requests, warm) < 1e-5
    check_same(warm, run(policy, requests))
    check_same(generate(engine, requests), warm)


@pytest.mark.parametrize("prefill_tokens", [1, 7, 16, 40])
def test_chunks_of_prompts_change_nothing(prefill_tokens: int) -> None:
    policy = exact_policy("gemma3_text")
    requests = requests_of(random_prompts(6, longest=60), FREE, n=2)
    check_same(run(policy, requests, prefill_tokens=prefill_tokens), run(policy, requests))


def test_a_pass_gathers_no_more_of_the_cache_than_its_limit() -> None:
    """Second turns on one long prompt: few new tokens, each sequence with its own copy of all that came before."""
    policy = exact_policy()
    shared = np.arange(96) % 50 + 1
    requests = [Request(("b", i), np.append(shared, i + 1), replace(FREE, max_tokens=2)) for i in range(12)]
    found, passes = [], []
    prefill = Runner.prefill
    for limit in (None, 300):
        engine = engine_of(policy)
        assert engine.scheduler.gathered_tokens == 3 * 2**28 // (2 * 32 * 8), "of one layer's keys and values"
        engine.scheduler.gathered_tokens = limit
        generate(engine, [Request(("a",), shared, replace(FREE, max_tokens=1))])
        sizes: list[int] = []

        def counted(self: Runner, parts: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(sum(sequence.cached + count for sequence, count in parts))
            return prefill(self, parts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "prefill", counted)
            found.append(generate(engine, requests))
        passes.append(sizes)
        check_at_rest(engine)
    check_same(*found)
    assert passes == [[12 * 97], [3 * 97] * 4]


def test_a_prompt_longer_than_the_limit_is_computed_alone() -> None:
    policy = exact_policy()
    requests = requests_of(random_prompts(4, longest=60), FREE)
    engine = engine_of(policy, prefill_tokens=16)
    engine.scheduler.gathered_tokens = 1
    check_same(generate(engine, requests), run(policy, requests))


@pytest.mark.parametrize("burst", [1, 3, 16])
def test_bursts_and_few_sequences_change_nothing(burst: int) -> None:
    policy = exact_policy(sharp=1.0)
    requests = ragged_requests(12)
    check_same(run(policy, requests, burst=burst, max_sequences=3), run(policy, requests))


def test_the_order_of_requests_changes_nothing() -> None:
    policy = exact_policy()
    requests = ragged_requests(12)
    check_same(run(policy, requests[::-1]), run(policy, requests))


def test_neighbours_that_cut_the_support_change_nothing() -> None:
    """Rows that need the host at every step run beside rows that do not."""
    policy = exact_policy()
    prompts = random_prompts(6)
    changes: list[dict[str, float]] = [
        {}, {"top_k": 5}, {"top_p": 0.5}, {"min_tokens": 4}, {"temperature": 0.0}, {"repetition_penalty": 1.3}
    ]  # fmt: skip
    requests = [
        Request(("mix", i), prompt, replace(FREE, ignore_eos=False, temperature=0.7), n=2)
        for i, prompt in enumerate(prompts)
    ]
    requests = [
        Request(r.key, r.prompt, replace(r.sampling, **change), r.n)
        for r, change in zip(requests, changes, strict=True)
    ]
    together = run(policy, requests)
    alone = sorted((c for r in requests for c in run(policy, [r])), key=lambda c: c.order)
    check_same(together, alone)


def test_samples_depend_on_seed_key_and_sample_only() -> None:
    policy = exact_policy()
    (prompt,) = random_prompts(1)
    ids = lambda seed, key, n: [  # noqa: E731
        tuple(c.ids) for c in run(policy, [Request(key, prompt, FREE, n)], seed=seed)
    ]
    assert ids(0, ("a", 1), 4) == ids(0, ("a", 1), 6)[:4]
    assert len(set(ids(0, ("a", 1), 4) + ids(1, ("a", 1), 4) + ids(0, ("a", 2), 4))) == 12


def test_requests_may_come_while_others_run() -> None:
    policy = exact_policy()
    requests = ragged_requests(6)
    engine = engine_of(policy, burst=1)
    for request in requests[:3]:
        engine.submit(request)
    found: list[Completion] = []
    for completion in engine.completions():
        found.append(completion)
        if len(found) == 1:
            for request in requests[3:]:
                engine.submit(request)
    check_same(sorted(found, key=lambda c: c.order), run(policy, requests))
    check_at_rest(engine)


def test_an_iterator_that_is_left_half_way_leaves_the_rest_for_the_next() -> None:
    policy = exact_policy()
    requests = ragged_requests(6)
    engine = engine_of(policy, burst=1, max_sequences=2)
    for request in requests:
        engine.submit(request)
    found = []
    for completion in engine.completions():
        found.append(completion)
        if len(found) == 2:
            break
    found += list(engine.completions())
    check_same(sorted(found, key=lambda c: c.order), run(policy, requests))
    check_at_rest(engine)


def test_the_cache_can_be_given_back_and_taken_again() -> None:
    policy = exact_policy()
    requests = ragged_requests(6)
    engine = engine_of(policy, burst=1)
    wanted = run(policy, requests)
    for request in requests:
        engine.submit(request)
    stream = engine.completions()
    found = [next(stream)]
    engine.release_cache()
    assert engine.cache.bytes == 0
    assert ids_of(sorted([*found, *stream], key=lambda c: c.order)) == ids_of(wanted), "taken again when it is needed"
    assert engine.cache.bytes > 0
    engine.release_cache()
    check_same(generate(engine, requests), wanted)


def test_seconds_are_counted_from_submission() -> None:
    policy = exact_policy()
    (completion,) = run(policy, [Request(("a",), np.arange(1, 5), FREE)])
    assert 0 < completion.first_seconds <= completion.seconds < 60
