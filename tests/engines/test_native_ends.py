"""Why completions end, and what happens when something goes wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lemma.engines.protocol import EngineError, Request, Sampling, generate
from tests.engines.native_checks import FREE, GREEDY, check_at_rest, check_same, engine_of, ids_of, requests_of, run
from tests.engines.small_policies import exact_policy, random_prompts, small_tokenizer


@pytest.mark.parametrize("burst", [1, 16])
def test_ends(burst: int) -> None:
    """End of sequence, stop ids, stop strings over several tokens, none within min_tokens, and the longest length."""
    policy = exact_policy(sharp=1.0)
    tokenizer = small_tokenizer()
    (prompt,) = random_prompts(1)
    free = replace(FREE, max_tokens=60)
    (whole,) = run(policy, [Request(("k",), prompt, free)])
    ids = whole.ids.tolist()
    assert whole.finish == "length" and len(ids) == 60
    end = ids[20]
    at = ids.index(end)

    def ended(**change: object) -> tuple[list[int], str]:
        (completion,) = run(policy, [Request(("k",), prompt, replace(free, **change))], burst=burst)
        assert len(completion.ids) == len(completion.logprobs) == len(completion.kept)
        np.testing.assert_allclose(completion.logprobs, whole.logprobs[: len(completion.ids)], atol=1e-5) if (
            completion.ids.tolist() == ids[: len(completion.ids)]
        ) else None
        return completion.ids.tolist(), completion.finish

    assert ended(stop_ids=(end,)) == (ids[: at + 1], "stop")
    assert ended(max_tokens=at + 1, stop_ids=(end,)) == (ids[: at + 1], "stop")
    assert ended(max_tokens=at, stop_ids=(end,)) == (ids[:at], "length")
    begin = next(i for i in range(30, 57) if "\ufffd" not in tokenizer.decode(ids[i : i + 3]))
    text = tokenizer.decode(ids[begin : begin + 3])
    assert text not in tokenizer.decode(ids[: begin + 2])
    assert ended(stop=(text,)) == (ids[: begin + 3], "stop")
    longer, finish = ended(stop_ids=(end,), min_tokens=at + 1)
    assert len(longer) > at + 1 and end not in longer[: at + 1]
    assert finish in ("stop", "length")
    assert ended(stop=(text,), min_tokens=begin + 3)[0][: begin + 3] == ids[: begin + 3]


def test_a_stop_string_survives_preemption() -> None:
    policy = exact_policy(sharp=1.0)
    prompts = random_prompts(8, longest=50)
    free = replace(FREE, max_tokens=40)
    texts = [small_tokenizer().decode(c.ids[24:27]) for c in run(policy, requests_of(prompts, free))]
    stops = tuple(text for text in texts if "\ufffd" not in text)
    requests = requests_of(prompts, replace(free, stop=stops))
    wanted = run(policy, requests)
    assert "stop" in {c.finish for c in wanted}
    engine = engine_of(policy, cache_tokens=200)
    check_same(generate(engine, requests), wanted)
    assert engine.scheduler.preemptions > 0


def test_the_end_of_sequence_token_ends() -> None:
    policy = exact_policy(sharp=0.0)
    requests = requests_of(random_prompts(4), Sampling(max_tokens=100), n=16)
    with torch.no_grad():
        policy.head.weight[policy.tokenizer.eos_token_id] *= 0
    found = run(policy, requests)
    eos = policy.tokenizer.eos_token_id
    for completion in found:
        assert (completion.ids[-1] == eos) == (completion.finish == "stop")
        assert eos not in completion.ids[:-1]
    assert {"stop", "length"} == {c.finish for c in found}


def test_the_context_is_the_longest_length() -> None:
    policy = exact_policy(context=32)
    prompt = np.arange(1, 29)
    (completion,) = run(policy, [Request(("a",), prompt, replace(FREE, max_tokens=99))])
    assert len(completion.ids) == 4 and completion.finish == "length"
    (tight,) = run(policy, [Request(("a",), prompt, replace(FREE, max_tokens=99))], cache_tokens=32)
    assert tight.ids.tolist() == completion.ids.tolist()


def test_what_cannot_be_generated_is_refused_at_once_and_nothing_is_lost() -> None:
    policy = exact_policy(context=64)
    engine = engine_of(policy, cache_tokens=48)
    engine.submit(Request(("good",), np.arange(1, 9), FREE))
    wrong = {
        "fills the context of 64": Request(("a", 1), np.arange(64), FREE),
        "is already running": Request(("good",), np.arange(1, 9), FREE),
        "do not fit into a cache of 48 tokens": Request(("a", 2), np.arange(1, 30), replace(FREE, max_tokens=20)),
        "prompt is empty": Request(("a", 3), np.array([], dtype=np.int64), FREE),
        "not a token": Request(("a", 4), np.array([1, policy.head.weight.shape[0]]), FREE),
        "-1, which is not a token": Request(("a", 5), np.array([1, -1]), FREE),
    }
    for sentence, request in wrong.items():
        with pytest.raises(EngineError, match=sentence) as caught:
            engine.submit(request)
        assert "\n" not in str(caught.value)
    assert [c.key for c in engine.completions()] == [("good",)]
    engine.submit(Request(("good",), np.arange(1, 9), FREE))
    assert [c.key for c in engine.completions()] == [("good",)]
    check_at_rest(engine)


def test_cancel_while_waiting_filling_and_running() -> None:
    policy = exact_policy()
    engine = engine_of(policy, burst=1, max_sequences=4, prefill_tokens=8)
    prompts = random_prompts(4, longest=30)
    for i, tokens in enumerate((3, 40, 40, 5)):
        engine.submit(Request((i,), prompts[i], replace(FREE, max_tokens=tokens), n=2))
    engine.cancel((2,))
    engine.cancel(("nobody",))
    found: dict[object, list] = {}
    for completion in engine.completions():
        found.setdefault(completion.key[0], []).append(completion)
        if completion.key == (0,):
            engine.cancel((1,))
    assert {c.finish for c in [*found[2], *found[1]]} == {"cancelled"}
    assert [len(c.ids) for c in found[2]] == [0, 0] and len(found[1]) == 2
    assert {c.finish for c in [*found[0], *found[3]]} == {"length"}
    check_at_rest(engine)
    (again,) = generate(engine, [Request((1,), prompts[1], FREE)])
    assert again.finish == "length"


def test_cancel_in_the_middle_of_a_chunked_prompt() -> None:
    policy = exact_policy()
    engine = engine_of(policy, prefill_tokens=8)
    engine.submit(Request(("a",), np.arange(1, 41), FREE, n=3))
    engine.submit(Request(("b",), np.arange(1, 41), FREE, n=3))
    engine.work()
    assert engine.scheduler.prefilling and engine.pool.free < engine.pool.count
    engine.cancel(("a",))
    found = sorted(engine.completions(), key=lambda c: c.order)
    assert [c.finish for c in found] == ["cancelled"] * 3 + ["length"] * 3
    check_same(found[3:], run(policy, [Request(("b",), np.arange(1, 41), FREE, n=3)]))
    check_at_rest(engine)


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("fails_at", ["prompt", "later"])
def test_logits_that_are_not_numbers_are_one_sentence_and_the_engine_goes_on(
    fails_at: str, share_prefixes: bool
) -> None:
    """After the weights are repaired nothing that was computed with the broken ones may be left in the cache."""
    policy = exact_policy()
    requests = requests_of(random_prompts(6, seed=1, longest=60), FREE)
    wanted = run(policy, requests)
    engine = engine_of(policy, cache_tokens=512, share_prefixes=share_prefixes)
    weight = policy.backbone.layers[0].mlp.down_proj.weight.data
    right = weight.clone()
    if fails_at == "later":
        for request in requests[:3]:
            engine.submit(Request(("early", *request.key), request.prompt, request.sampling))
        next(engine.completions())
        engine.submit(Request(("early", "x"), np.arange(1, 50), FREE))
    weight.fill_(float("nan"))
    for request in requests:
        engine.submit(request)
    with pytest.raises(EngineError, match="not numbers") as caught:
        list(engine.completions())
    assert "\n" not in str(caught.value)
    check_at_rest(engine)
    weight.copy_(right)
    check_same(generate(engine, requests), wanted)


@pytest.mark.parametrize("call", [2, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory.\nTried to")])
def test_ctrl_c_and_a_full_device_leave_the_engine_usable(call: int, error: BaseException) -> None:
    policy = exact_policy()
    policy.module.train()
    requests = requests_of(random_prompts(4, longest=60), FREE, n=2)
    wanted = run(policy, requests)
    engine = engine_of(policy, prefill_tokens=64)
    hidden, calls = policy.hidden_cached, []

    def failing(*args: torch.Tensor) -> torch.Tensor:
        calls.append(args)
        result = hidden(*args)
        if len(calls) == call:
            raise error
        return result

    policy.hidden_cached = failing
    for request in requests:
        engine.submit(request)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else EngineError
    with pytest.raises(expected) as caught:
        list(engine.completions())
    if expected is EngineError:
        assert "memory" in str(caught.value) and "\n" not in str(caught.value)
    check_at_rest(engine)
    assert list(engine.completions()) == []
    check_same(generate(engine, requests), wanted)


def test_a_tokenizer_less_policy_has_no_end() -> None:
    """Benchmarks have none; min_tokens then forbids nothing, least of all the last token of the vocabulary."""
    policy = exact_policy()
    request = Request(("a",), np.arange(1, 9), replace(FREE, ignore_eos=False, min_tokens=5), n=8)
    wanted = run(policy, [Request(("a",), np.arange(1, 9), FREE, n=8)])
    policy.tokenizer = None
    found = run(policy, [request])
    assert ids_of(found) == ids_of(wanted)
    assert all((c.kept == 0).all() for c in found)


def test_close_forgets_what_is_unfinished() -> None:
    policy = exact_policy()
    engine = engine_of(policy, burst=1)
    for request in requests_of(random_prompts(4), GREEDY):
        engine.submit(request)
    next(engine.completions())
    engine.close()
    check_at_rest(engine)
    assert list(engine.completions()) == [] and engine.cache.bytes == 0


def test_a_cache_that_finds_no_memory_leaves_the_engine_usable() -> None:
    policy = exact_policy()
    requests = requests_of(random_prompts(3), FREE)
    engine = engine_of(policy)
    engine.release_cache()
    shape = engine.cache.shape
    engine.cache.shape = (2**30, *shape[1:])
    engine.submit(requests[0])
    with pytest.raises(RuntimeError, match="memory"):
        list(engine.completions())
    assert engine.cache.bytes == 0
    check_at_rest(engine)
    engine.cache.shape = shape
    check_same(generate(engine, requests), run(policy, requests))
