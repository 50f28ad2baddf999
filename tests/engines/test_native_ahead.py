"""Bursts that are launched before the last one is read change nothing. On a CPU they run at once, by the same logic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lemma.engines.native import engine as native
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Completion, EngineError, Request, Sampling, generate
from lemma.models.policy import Policy
from tests.engines.native_checks import FREE, check_at_rest, check_same, engine_of, requests_of, run
from tests.engines.small_policies import exact_policy, random_prompts, shake, small_tokenizer, worst_difference


def ragged(count: int, **change: object) -> list[Request]:
    prompts = random_prompts(count, seed=4, longest=50)
    sampling = replace(FREE, temperature=0.8, **change)
    return [Request(("r", i), p, replace(sampling, max_tokens=1 + 11 * i % 47)) for i, p in enumerate(prompts)]


def run_ahead(policy: Policy, requests: list[Request], **settings: object) -> tuple[list[Completion], NativeEngine]:
    engine = engine_of(policy, **{"ahead": True, **settings})
    found = generate(engine, requests)
    check_at_rest(engine)
    assert engine.bursts_ahead > 0 and engine._in_flight is None
    return found, engine


def count_steps(policy: Policy) -> list[int]:
    """The rows of every forward pass from now on."""
    seen: list[int] = []
    hidden = policy.hidden_cached
    policy.hidden_cached = lambda ids, *rest: (seen.append(len(ids)), hidden(ids, *rest))[1]
    return seen


@pytest.mark.parametrize("burst", [1, 3, 16])
def test_lengths_that_are_foreseen_cost_nothing(burst: int) -> None:
    """The same completions in the same order from the same forward passes, row by row, where the first burst is as
    short as a GPU's, whether or not it is launched ahead."""
    policy = exact_policy()
    streams, passes = [], []
    for ahead in (False, True):
        engine = engine_of(policy, ahead=ahead, burst=burst)
        engine._first_burst = min(native.FIRST_BURST, burst)
        for request in ragged(20):
            engine.submit(request)
        seen = count_steps(policy)
        streams.append(list(engine.completions()))
        passes.append(list(seen))
        assert (engine.bursts_ahead > 0) == ahead
    assert passes[0] == passes[1]
    check_same(*streams)


@pytest.mark.parametrize("burst", [1, 5])
def test_no_burst_is_longer_than_was_asked_for(burst: int) -> None:
    """Nor those that are launched before first tokens are read."""
    engine = engine_of(exact_policy(), ahead=True, burst=burst)
    launch, steps = engine.runner.launch, []
    engine.runner.launch = lambda rows, count, *rest: (steps.append(count), launch(rows, count, *rest))[1]
    generate(engine, requests_of(random_prompts(3), replace(FREE, max_tokens=20)))
    assert steps[0] == min(burst, native.FIRST_BURST) and max(steps) == burst


@pytest.mark.parametrize(("burst", "max_sequences"), [(1, 64), (4, 64), (16, 64), (4, 5)])
def test_ends_that_are_not_foreseen_change_nothing(burst: int, max_sequences: int) -> None:
    """End tokens and stop strings; the rows that ended are computed for one burst more and dropped then."""
    policy = exact_policy(sharp=0.5)
    free = run(policy, ragged(16))
    texts = [small_tokenizer().decode(c.ids[len(c.ids) // 2 :][:2]) for c in free]
    stops = tuple(sorted({text for text in texts if text and "\ufffd" not in text}))
    ends = tuple(int(c.ids[len(c.ids) // 2]) for c in free[::3])
    for change in ({"stop": stops}, {"stop_ids": ends}):
        requests = ragged(16, **change)
        wanted = run(policy, requests)
        assert {c.finish for c in wanted} == {"stop", "length"}
        found, _ = run_ahead(policy, requests, burst=burst, max_sequences=max_sequences)
        check_same(found, wanted)


def test_preemption_ends_it_for_a_while_and_changes_nothing() -> None:
    policy = exact_policy("mistral")
    requests = ragged(16, ignore_eos=False)
    longest = max(len(r.prompt) + r.sampling.max_tokens for r in requests)
    wanted = run(policy, requests)
    for cache_tokens in (320, longest):
        found, engine = run_ahead(policy, requests, cache_tokens=cache_tokens, burst=3)
        check_same(found, wanted)
        assert engine.scheduler.preemptions > 0 or cache_tokens == longest


def test_nobody_gives_way_for_a_burst_that_is_launched_ahead() -> None:
    """Two rows that fill the cache to the last block."""
    policy = exact_policy()
    requests = requests_of([np.arange(1, 17), np.arange(2, 18)], replace(FREE, max_tokens=32))
    found, engine = run_ahead(policy, requests, cache_tokens=96, burst=4)
    check_same(found, run(policy, requests))
    assert engine.scheduler.preemptions == 0


def test_rows_that_need_the_host_are_never_launched_ahead() -> None:
    """`min_tokens` needs the host only at first, cuts and penalties always."""
    policy = exact_policy()
    changes: list[dict[str, float]] = [{}, {"min_tokens": 9}, {"top_k": 5}, {"repetition_penalty": 1.3}]
    prompts = random_prompts(4)
    requests = [
        Request(("mix", i), prompts[i], replace(FREE, ignore_eos=False, max_tokens=30 - 5 * i, **change))
        for i, change in enumerate(changes)
    ]
    found, _ = run_ahead(policy, requests, burst=2)
    check_same(found, run(policy, requests))
    engine = engine_of(policy, ahead=True, burst=2)
    check_same(generate(engine, requests[2:3]), run(policy, requests[2:3]))
    assert engine.bursts_ahead == 0


def test_many_rows_that_end_unforeseen_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = exact_policy(sharp=0.0)
    requests = requests_of(random_prompts(4), Sampling(max_tokens=60), n=8)
    with torch.no_grad():
        policy.head.weight.zero_()
    policy.head.bias = torch.nn.Parameter(torch.zeros(policy.head.weight.shape[0]))
    with torch.no_grad():
        policy.head.bias[policy.tokenizer.eos_token_id] = 4.0
    wanted, rows = run(policy, requests), []
    seen = count_steps(policy)
    for share in (native.ROWS_PER_UNEXPECTED_END, 0):
        monkeypatch.setattr(native, "ROWS_PER_UNEXPECTED_END", share)
        seen.clear()
        found, _ = run_ahead(policy, requests, burst=2)
        check_same(found, wanted)
        rows.append(sum(seen))
    assert rows[0] < rows[1]


# What the host has read of each row when the first request of 7 tokens ends: first tokens, two steps, a burst of 4.
READ = 7


def flying(policy: Policy, requests: list[Request], **settings: object) -> tuple[NativeEngine, Completion]:
    """An engine that has given its first completion while a burst is under way."""
    engine = engine_of(policy, **{"ahead": True, "burst": 4, **settings})
    for request in requests:
        engine.submit(request)
    first = next(engine.completions())
    assert engine._in_flight is not None
    return engine, first


def test_cancel_while_a_burst_flies() -> None:
    """The tokens that were read stay, those that fly are dropped; then the same for all that is left."""
    policy = exact_policy()
    requests = requests_of(random_prompts(5), replace(FREE, max_tokens=40))
    requests[0] = replace(requests[0], sampling=replace(FREE, max_tokens=7))
    wanted = run(policy, requests)
    engine, first = flying(policy, requests)
    engine.cancel(requests[2].key)
    found = sorted([first, *engine.completions()], key=lambda c: c.order)
    assert found[2].finish == "cancelled" and found[2].ids.tolist() == wanted[2].ids[:READ].tolist()
    check_same(found[:2] + found[3:], wanted[:2] + wanted[3:])
    check_at_rest(engine)
    engine, first = flying(policy, requests)
    for request in requests[1:]:
        engine.cancel(request.key)
    assert {c.finish for c in engine.completions()} == {"cancelled"}
    check_at_rest(engine)
    check_same(generate(engine, requests), wanted)


def test_new_weights_while_a_burst_flies() -> None:
    """What was read was drawn with the old weights, all the rest with the new ones."""
    policy = exact_policy()
    sampling = replace(FREE, max_tokens=40, temperature=0.0)
    requests = requests_of(random_prompts(3), sampling)
    requests[0] = replace(requests[0], sampling=replace(sampling, max_tokens=7))
    wanted = run(policy, requests)
    engine, _ = flying(policy, requests)
    shake(policy, 1, size=0.1)
    engine.update_weights(1)
    rest = sorted(engine.completions(), key=lambda c: c.order)
    for request, old, new in zip(requests[1:], wanted[1:], rest, strict=True):
        assert new.ids[:READ].tolist() == old.ids[:READ].tolist()
        whole = np.concatenate([request.prompt, new.ids])
        logits = policy.causal(torch.from_numpy(whole)[None]).logits[0]
        assert logits[len(request.prompt) + READ - 1 : -1].argmax(-1).tolist() == new.ids[READ:].tolist()
    check_at_rest(engine)
    assert worst_difference(policy, requests, generate(engine, requests)) < 1e-5


@pytest.mark.parametrize("act", ["release_cache", "invalidate", "leave"])
def test_a_burst_that_flies_when_others_use_the_device(act: str) -> None:
    policy = exact_policy()
    requests = requests_of(random_prompts(5), replace(FREE, max_tokens=40), n=2)
    requests[0] = replace(requests[0], sampling=replace(FREE, max_tokens=7))
    engine, first = flying(policy, requests)
    if act != "leave":
        getattr(engine, act)()
    found = sorted([first, *engine.completions()], key=lambda c: c.order)
    check_same(found, run(policy, requests))
    check_at_rest(engine)


@pytest.mark.parametrize("call", [2, 3, 5, 8])
def test_trouble_while_a_burst_flies(call: int) -> None:
    policy = exact_policy()
    requests = requests_of(random_prompts(4), replace(FREE, max_tokens=9))
    wanted = run(policy, requests)
    engine = engine_of(policy, ahead=True, burst=2)
    hidden, calls = policy.hidden_cached, []

    def failing(*args: torch.Tensor) -> torch.Tensor:
        calls.append(args)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(*args)

    policy.hidden_cached = failing
    for request in requests:
        engine.submit(request)
    with pytest.raises(EngineError, match="memory"):
        list(engine.completions())
    check_at_rest(engine)
    check_same(generate(engine, requests), wanted)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_and_go_at_any_time_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, second turns that find the blocks of the first, cancellations, few rows or a small cache: each completion
    is that of the request alone. Batches have the sizes that graphs have, so that some rows are in nobody's use."""
    monkeypatch.setattr(native, "ROWS_PER_UNEXPECTED_END", 0)
    policy = exact_policy(sharp=1.0)
    rng = np.random.default_rng(seed)
    sampling = Sampling(max_tokens=24, stop_ids=tuple(range(20)))
    settings = {"burst": int(rng.integers(1, 6)), "max_sequences": int(rng.integers(3, 30))}
    engine = engine_of(policy, ahead=True, cache_tokens=int(rng.integers(200, 900)), **settings)
    monkeypatch.setattr(engine.runner, "use_graphs", True)
    monkeypatch.setattr(engine.runner, "_step", engine.runner._compute)
    requests: dict[object, Request] = {}

    def submit(prompt: np.ndarray) -> None:
        tokens = int(rng.integers(1, 40))
        change = {"min_tokens": min(tokens, 3)} if rng.random() < 0.2 else {}
        request = Request(
            (len(requests),), prompt, replace(sampling, max_tokens=tokens, **change), int(rng.integers(1, 4))
        )
        requests[request.key] = request
        engine.submit(request)

    for prompt in random_prompts(6, seed=seed, longest=60):
        submit(prompt)
    found: list[Completion] = []
    for completion in engine.completions():
        found.append(completion)
        if rng.random() < 0.5 and len(requests) < 20:
            asked = requests[completion.key].prompt
            submit(np.concatenate([asked, completion.ids, rng.integers(1, 99, 3)])[:120])
        if rng.random() < 0.1:
            engine.cancel((int(rng.integers(len(requests))),))
    check_at_rest(engine)
    assert engine.bursts_ahead > 0
    assert len(found) == sum(request.n for request in requests.values())
    alone = {(c.key, c.sample): c for request in requests.values() for c in run(policy, [request])}
    for completion in found:
        wanted = alone[completion.key, completion.sample]
        if completion.finish == "cancelled":
            assert completion.ids.tolist() == wanted.ids[: len(completion.ids)].tolist()
        else:
            check_same([completion], [wanted])
