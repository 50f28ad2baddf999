"""What every vLLM engine must do, whichever way it is reached. Not collected by itself."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from lemma.core.types import Message, Problem
from lemma.engines.protocol import Completion, EngineError, Request, Sampling, generate
from lemma.engines.remote.weights_probe import verify
from lemma.engines.sampling import cut
from lemma.engines.transformers_engine import TransformersEngine
from lemma.engines.vllm.vllm_base import VllmBase
from lemma.engines.vllm.vllm_options import VllmOptions
from lemma.environments import HigherLower
from lemma.formats import make_format
from lemma.formats.bridge import Bridge
from lemma.formats.encode import encode_prompt
from lemma.models.policy import Policy
from lemma.rewards import make_reward
from lemma.rollouts import SampleRequest, Scorer, World, play
from tests.engines.small_policies import learner_logprobs, random_prompts, shake, small_tokenizer, worst_difference

QUICK = VllmOptions(cache_gib=0.25, sequences=32, start_seconds=480.0, answer_seconds=240.0)
GREEDY = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
FREE = Sampling(max_tokens=16, ignore_eos=True)


def requests_of(sampling: Sampling, count: int = 5, n: int = 1) -> list[Request]:
    return [Request(("check", i), prompt, sampling, n) for i, prompt in enumerate(random_prompts(count))]


def check_logprobs(engine: VllmBase) -> None:
    """At every temperature, log-probabilities are the learner's, and samples do not depend on their neighbours."""
    for temperature in (1.0, 0.6, 1.5):
        requests = requests_of(replace(FREE, temperature=temperature), n=3)
        found = generate(engine, requests)
        assert [(c.key, c.sample) for c in found] == [(r.key, s) for r in requests for s in range(3)]
        assert worst_difference(engine.policy, requests, found, temperature) < 1e-4
        assert all(len(c.ids) == 16 and c.finish == "length" and (c.kept == 0).all() for c in found)
        assert len({tuple(c.ids) for c in found}) == 15
        (alone,) = generate(engine, [replace(requests[2], n=1)])
        assert alone.ids.tolist() == found[6].ids.tolist()
        assert all(c.seconds > 0 for c in found)


def _stop_in_the_middle(policy: Policy) -> tuple[np.ndarray, str, int]:
    """A prompt, a string that begins in one token of its greedy completion and ends in a later one, and where."""
    tokenizer = small_tokenizer()
    prompts = random_prompts(60, seed=1)
    requests = [Request((i,), prompt, replace(GREEDY, max_tokens=30)) for i, prompt in enumerate(prompts)]
    for whole in generate(TransformersEngine(policy, 0), requests):
        for i in range(3, 28):
            text = tokenizer.decode(whole.ids[i : i + 2])
            so_far = tokenizer.decode(whole.ids[: i + 1])
            if "\ufffd" not in text and len(text) >= 2 and text not in so_far:
                return prompts[whole.key[0]], text, i + 2
    raise AssertionError("no such string: take other prompts")


def check_ends(engine: VllmBase) -> None:
    """Greedy completions with every kind of end and cut, token for token those of the reference engine."""
    policy = engine.policy
    prompt, text, end = _stop_in_the_middle(policy)
    (free,) = generate(TransformersEngine(policy, 0), [Request(("x",), prompt, GREEDY)])
    eos_like = int(free.ids[4])
    kinds = {
        "stop string": replace(GREEDY, max_tokens=60, stop=("never", text)),
        "stop string later": replace(GREEDY, max_tokens=60, stop=(text,), min_tokens=end),
        "stop id": replace(GREEDY, stop_ids=(eos_like,)),
        "stop id later": replace(GREEDY, stop_ids=(eos_like,), min_tokens=9),
        "end of sequence": replace(GREEDY, ignore_eos=False),
        "penalty": replace(GREEDY, repetition_penalty=1.7),
        "one token": replace(GREEDY, max_tokens=1),
        "context": replace(GREEDY, max_tokens=10_000),
    }
    requests = [Request((name,), prompt, sampling) for name, sampling in kinds.items()]
    found = {c.key[0]: c for c in generate(engine, requests)}
    expected = {c.key[0]: c for c in generate(TransformersEngine(policy, 0), requests)}
    for name, reference in expected.items():
        assert found[name].ids.tolist() == reference.ids.tolist(), name
        assert found[name].finish == reference.finish, name
        np.testing.assert_allclose(found[name].logprobs, reference.logprobs, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(found[name].kept, reference.kept, atol=1e-4, err_msg=name)
    assert found["stop string"].finish == "stop" and len(found["stop string"].ids) == end
    assert len(found["stop string later"].ids) > end
    assert (found["stop id later"].kept[:9] < 0).all()
    assert len(found["context"].ids) + len(prompt) == engine.context


def check_cuts(engine: VllmBase) -> None:
    """Sampled ids are within the support, and the kept mass is that of the reference."""
    policy = engine.policy
    sampling = replace(FREE, temperature=0.8, top_k=12, top_p=0.7, min_p=0.02, min_tokens=2)
    for completion in generate(engine, requests_of(sampling, count=3, n=2)):
        prompt = random_prompts(5)[completion.key[1]]
        whole = torch.from_numpy(np.concatenate([prompt, completion.ids]))
        logits = policy.causal(whole[None]).logits[0, len(prompt) - 1 : -1].detach()
        masked, kept = cut(logits, sampling)
        np.testing.assert_allclose(completion.kept, kept.numpy(), atol=1e-4)
        drawn = masked.log_softmax(-1).gather(-1, torch.from_numpy(completion.ids)[:, None])[:, 0]
        np.testing.assert_allclose(completion.sampler_logprobs, drawn.numpy(), atol=1e-4)


def check_update(engine: VllmBase) -> None:
    """New weights are seen after the update and only then; the probe knows the difference."""
    policy = engine.policy
    requests = requests_of(GREEDY)
    before = generate(engine, requests)
    shake(policy, 11, size=0.1)
    stale = generate(engine, requests)
    assert [tuple(c.ids) for c in stale] == [tuple(c.ids) for c in before]
    assert worst_difference(policy, requests, stale) > 1e-2
    with pytest.raises(EngineError, match="does not hold the policy's weights"):
        verify(policy, engine._score(engine.scored.ids[:24]), 5)
    engine.update_weights(5)
    assert engine.difference < 1e-4
    after = generate(engine, requests)
    assert [tuple(c.ids) for c in after] == [tuple(c.ids) for c in generate(TransformersEngine(policy, 0), requests)]
    assert worst_difference(policy, requests, after) < 1e-4
    assert {c.policy_version for c in after} == {5}


def check_cancel(engine: VllmBase) -> None:
    """A cancelled request ends at once, waiting or running; the others do not notice."""
    long = replace(FREE, max_tokens=200)
    prompts = random_prompts(5)
    engine.submit(Request(("stay",), prompts[0], FREE, 2))
    engine.submit(Request(("go",), prompts[1], long, 2))
    engine.submit(Request(("go early",), prompts[2], long))
    engine.cancel(("go early",))
    found: dict[tuple[object, int], str] = {}
    for completion in engine.completions():
        found[completion.key[0], completion.sample] = completion.finish
        if completion.key == ("stay",):
            engine.cancel(("go",))
            if completion.sample == 0:
                engine.submit(Request(("late",), prompts[3], FREE))
    assert found == {
        ("stay", 0): "length",
        ("stay", 1): "length",
        ("go", 0): "cancelled",
        ("go", 1): "cancelled",
        ("go early", 0): "cancelled",
        ("late", 0): "length",
    }


def check_too_long(engine: VllmBase) -> None:
    with pytest.raises(EngineError, match=f"fills the context of {engine.context}"):
        engine.submit(Request(("long",), np.arange(1, engine.context + 1) % 300, FREE))
    assert len(generate(engine, requests_of(FREE, count=1))) == 1


@torch.no_grad()
def check_not_finite(engine: VllmBase) -> None:
    """Broken weights are refused at the update; a completion from them is one sentence; repair brings all back."""
    weight = engine.policy.head.weight
    first = weight[0].clone()
    weight[0] = float("nan")
    with pytest.raises(EngineError, match=r"does not hold the policy's weights|not finite|refused"):
        engine.update_weights(6)
    engine.submit(requests_of(FREE, count=1)[0])
    with pytest.raises(EngineError, match="not finite for request check/0"):
        list(engine.completions())
    weight[0] = first
    engine.update_weights(7)
    requests = requests_of(FREE, count=2)
    assert worst_difference(engine.policy, requests, generate(engine, requests)) < 1e-4


def check_update_while_running(engine: VllmBase, count: int) -> None:
    """What is generated after an update comes from the new weights, its cache included.

    A server does not wait for us, and on a busy machine both sides may be late: so there are more requests than run
    side by side, of different lengths, and several tries. Weights or cache that stay the old ones fail all of them.
    """
    assert any(_has_a_turn(engine, number, count) for number in range(4)), "no response turns to the new weights"


def _has_a_turn(engine: VllmBase, number: int, count: int) -> bool:
    """Change the weights after some responses: does another begin with the old ones and end with the new ones?"""
    policy = engine.policy
    prompts = random_prompts(count, seed=number)
    for i, prompt in enumerate(prompts):
        length = (engine.context - len(prompt)) * (i % 8 + 1) // 8
        engine.submit(Request((number, i), prompt, replace(GREEDY, max_tokens=length)))
    stream = engine.completions()
    first = [next(stream) for _ in range(count // 4)]
    old = copy.deepcopy(policy)
    shake(policy, 12 + number, size=0.05)
    engine.update_weights(8 + number)
    rest = list(stream)
    assert sorted(c.key for c in first + rest) == [(number, i) for i in range(count)]
    if engine.updates_in_flight:
        told = [_is_as_told(prompts[c.key[1]], c, old, policy, 8 + number) for c in rest]
        assert all(told), "which version sampled which token"
        return any(len(c.spans) > 1 for c in rest)
    turns = [_turn(prompts[c.key[1]], c.ids, old, policy) for c in rest]
    assert turns.count(None) <= 0.1 * len(turns), "no token may come from new weights over the old ones' cache"
    return any(turn is not None and 0 < turn <= 0.8 for turn in turns)


def _is_as_told(prompt: np.ndarray, one: Completion, old: Policy, new: Policy, version: int) -> bool:
    """Whether the tokens are those of the versions that the completion names."""
    turn = next(
        (first for first, sampled_by in one.spans or ((0, one.policy_version),) if sampled_by == version), len(one.ids)
    )
    told = np.concatenate([_greedy(old, prompt, one.ids)[:turn], _greedy(new, prompt, one.ids)[turn:]])
    return bool((told == one.ids).all())


def _turn(prompt: np.ndarray, ids: np.ndarray, old: Policy, new: Policy) -> float | None:
    """The share of a response after which all comes from the new weights; None where it does not begin with the old."""
    by_old, by_new = _greedy(old, prompt, ids), _greedy(new, prompt, ids)
    turn = int(np.flatnonzero(by_new != ids).max(initial=-1)) + 1
    return turn / len(ids) if (by_old == ids)[:turn].all() else None


@torch.no_grad()
def _greedy(policy: Policy, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The likeliest token at every place of a response."""
    logits = policy.causal(torch.from_numpy(np.concatenate([prompt, ids]))[None]).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).numpy()


def check_episodes(engine: VllmBase) -> None:
    """Over several turns, with either schedule, log-probabilities are the learner's and prompts are the journal's."""
    policy, fmt = engine.policy, make_format("question_only")
    bridge = Bridge.of(fmt, policy.tokenizer, (), 24)
    problems = [Problem((Message("user", f"{number} times 7"),)) for number in range(3)]
    found = {}
    for schedule in ("exact", "free"):
        world = World(HigherLower(turns=3, schedule=schedule), bridge, engine.context)
        asks = [
            SampleRequest(
                ("vllm", number), replace(problem, golds=("987654",)), encode_prompt(fmt, problem, policy.tokenizer), 2
            )
            for number, problem in enumerate(problems)
        ]
        scorer = Scorer(fmt, [make_reward("environment")], policy.tokenizer)
        episodes = sorted(play(engine, asks, FREE, scorer, world=world), key=lambda one: one.order)
        assert len(episodes) == 6 and {len(one.turns) for one in episodes} == {3}
        for one in episodes:
            for number, turn in enumerate(one.turns):
                learnt = learner_logprobs(policy, one.context(number).astype(np.int64), turn.ids.astype(np.int64))
                assert np.abs(learnt - turn.logprobs).max() < 1e-4
        found[schedule] = [[turn.ids.tolist() for turn in one.turns] for one in episodes]
    assert found["exact"] == found["free"]
