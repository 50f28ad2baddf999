"""Families that Lemma takes, beside plain transformers: packs, gradients, greedy tokens; and why others are refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.engines.native.engine_probe import probe
from lemma.engines.protocol import EngineError, Sampling, generate
from lemma.engines.transformers_engine import TransformersEngine
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy
from tests.engines.native_checks import engine_of, requests_of
from tests.engines.small_policies import worst_difference
from tests.models.families import LEARNER_ONLY, REFUSED, TAKEN, family_policy, plain_model

LENGTHS = (1, 30, 12, 25, 2)
CPU = torch.device("cpu")
LEARNT = [*TAKEN.items(), *((kind, values) for kind, (values, _) in LEARNER_ONLY.items())]
NAMES = [*TAKEN, *(f"{kind}, learner" for kind in LEARNER_ONLY)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products this small are slower on several threads, much slower where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def passing(kinds: Collection[str]) -> list[Any]:
    """All in bf16, where rounding is what a probe must not take for a fault. In float32, where the other tests of this
    file compare log-probabilities, gradients and tokens of all, `make test` takes every sixth."""
    in_bf16 = [pytest.param(kind, torch.bfloat16, id=f"{kind}-bf16") for kind in kinds]
    marks = [[] if number % 6 == 0 else [pytest.mark.long] for number, _ in enumerate(kinds)]
    in_fp32 = [
        pytest.param(kind, torch.float32, id=f"{kind}-fp32", marks=mark)
        for kind, mark in zip(kinds, marks, strict=True)
    ]
    return in_bf16 + in_fp32


@pytest.mark.parametrize(("kind", "dtype"), passing(TAKEN))
def test_both_probes_pass(kind: str, dtype: torch.dtype) -> None:
    policy = family_policy(kind, TAKEN[kind], dtype)
    policy.probe()
    probe(policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", LEARNER_ONLY)
def test_the_learner_passes_and_the_engine_says_why_not(kind: str, dtype: torch.dtype) -> None:
    values, reason = LEARNER_ONLY[kind]
    policy = family_policy(kind, values, dtype)
    policy.probe()
    with pytest.raises(EngineError, match=f"the native engine cannot run .*{reason}"):
        probe(policy)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_neither_computes_is_refused_with_the_reason(kind: str) -> None:
    values, reason = REFUSED[kind]
    policy = family_policy(kind, values)
    with pytest.raises(UserError, match=f"the learner cannot train .*{reason}"):
        policy.probe()
    with pytest.raises(EngineError, match=f"the native engine cannot run .*{reason}"):
        probe(policy)


@pytest.mark.parametrize(("kind", "values"), LEARNT, ids=NAMES)
def test_a_pack_is_separate_plain_forwards(kind: str, values: dict[str, Any]) -> None:
    """Log-probabilities, and the gradient of every weight, beside eager attention without anything of Lemma's in it."""
    mine, theirs = family_policy(kind, values), plain_model(kind, values)
    rng = np.random.default_rng(0)
    items = [Trajectory(rng.integers(1, 320, length), np.arange(length) > 0) for length in LENGTHS]
    found = mine.logprobs(TokenBatch.build(items, range(len(items)), CPU))
    wanted = torch.cat([plain_logprobs(theirs, item.ids_T) for item in items])
    assert wanted.std() > 0.3, "flat distributions show nothing"
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    found.sum().backward()
    wanted.sum().backward()
    check_gradients(mine, theirs)


def plain_logprobs(model: Any, ids: np.ndarray) -> torch.Tensor:
    row = torch.from_numpy(ids)
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]


def check_gradients(mine: Policy, theirs: Any) -> None:
    plain = dict(theirs.named_parameters())
    assert any(parameter.grad is not None for parameter in plain.values())
    for name, parameter in mine.parameters().items():
        grad, wanted = parameter.grad, plain[name].grad
        if wanted is None or not wanted.any():
            assert grad is None or grad.norm() < 1e-4, name
            continue
        assert grad is not None, name
        assert (grad - wanted).norm() < 1e-3 * wanted.norm() + 1e-4, name


@pytest.mark.parametrize("kind", LEARNER_ONLY)
def test_the_engine_that_serves_the_others_says_what_the_learner_says(kind: str) -> None:
    """Prompts of unequal lengths in one padded batch."""
    policy = family_policy(kind, LEARNER_ONLY[kind][0])
    requests = requests_of([np.arange(5, 25) * 7 % 320, np.arange(1, 4)], Sampling(max_tokens=6, ignore_eos=True))
    found = generate(TransformersEngine(policy, 0), requests)
    assert worst_difference(policy, requests, found) < 1e-4


@pytest.mark.parametrize("kind", TAKEN)
def test_greedy_tokens_are_those_of_generate(kind: str) -> None:
    """Two prompts side by side, in chunks, beyond every window."""
    policy, plain = family_policy(kind, TAKEN[kind]), plain_model(kind, TAKEN[kind])
    prompts = [np.arange(5, 25) * 7 % 320, np.arange(1, 4)]
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = generate(engine_of(policy, prefill_tokens=9), requests_of(prompts, sampling))
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.from_numpy(prompt)[None]
        theirs = plain.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=-1, pad_token_id=0)
        assert completion.ids.tolist() == theirs[0, len(prompt) :].tolist()
