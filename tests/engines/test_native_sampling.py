"""What is drawn has the probabilities that the model says, for every way of sampling; the noise is as it should be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lemma.core.random import key as random_key
from lemma.engines.native.cuts import Cuts
from lemma.engines.native.noise import FIRST, MASK, SECOND, gumbel, mix, row_seeds, split_key
from lemma.engines.native.sampler import ENDS, sampling_mode
from lemma.engines.native.sequences import History, Readback, Sequence
from lemma.engines.protocol import Completion, Request, Sampling, generate
from lemma.engines.sampling import cut
from lemma.models.policy import Policy
from tests.engines.native_checks import engine_of, run
from tests.engines.small_policies import exact_policy, learner_logprobs

CHANGES: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "temperature": 1.3},
    {"top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    {"min_tokens": 8},
    {"min_tokens": 3, "top_k": 30, "min_p": 0.01},
]


def most_likely_chi_square(freedom: int) -> float:
    """What one test in some hundred thousand exceeds by chance."""
    return freedom + 4.3 * float(np.sqrt(2 * freedom)) + 10


def chi_square(counts: np.ndarray, expected: np.ndarray) -> None:
    """Cells too rare for the test are put together."""
    rare = expected < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum() + 1e-9)
    if expected[-1] < 8:
        assert counts[-1] < 40
        counts, expected = counts[:-1], expected[:-1]
    found = float(((counts - expected) ** 2 / expected).sum())
    assert found < most_likely_chi_square(len(counts)), (found, len(counts))


def forgetful_policy() -> tuple[Policy, torch.Tensor]:
    """A model that says the same about every next token, whatever came before; and its logits."""
    policy = exact_policy()
    generator = torch.Generator().manual_seed(5)
    logits = 2.0 * torch.randn(policy.head.weight.shape[0], generator=generator)
    logits[policy.tokenizer.eos_token_id] = logits.max() - 1
    with torch.no_grad():
        policy.head.weight.zero_()
    policy.head.bias = torch.nn.Parameter(logits)
    return policy, logits


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change) or "plain")
def test_frequencies_and_kept_mass_match_exact_probabilities(change: dict[str, float]) -> None:
    """First tokens and those of bursts, over samples and positions."""
    policy, logits = forgetful_policy()
    sampling = replace(Sampling(max_tokens=8, ignore_eos="min_tokens" not in change), **change)
    found = run(policy, [Request(("x",), np.arange(1, 20), sampling, n=600)], max_sequences=300, cache_tokens=16384)
    end = policy.tokenizer.eos_token_id
    forbidden = (end,) if sampling.min_tokens else ()
    masked, kept = cut(logits, sampling, forbidden)
    early = [c.ids[: sampling.min_tokens or 8] for c in found]
    drawn = np.concatenate(early)
    assert len(drawn) == 600 * (sampling.min_tokens or 8)
    counts = np.bincount(drawn, minlength=len(logits)).astype(float)
    probabilities = masked.double().softmax(-1).numpy()
    assert counts[probabilities == 0].sum() == 0
    chi_square(counts, len(drawn) * probabilities)
    for completion in found:
        count = min(sampling.min_tokens or 8, len(completion.ids))
        np.testing.assert_allclose(completion.kept[:count], kept.item(), atol=1e-5)
        behaviour = masked.log_softmax(-1)[completion.ids[:count]]
        np.testing.assert_allclose(completion.sampler_logprobs[:count], behaviour, atol=1e-5)
    if sampling.min_tokens == 3:
        after = np.array([c.ids[3] for c in found])
        _, wide = cut(logits, sampling)
        assert abs((after == end).mean() - cut(logits, sampling)[0].softmax(-1)[end].item()) < 0.08
        np.testing.assert_allclose([c.kept[3] for c in found], wide.item(), atol=1e-5)


@pytest.mark.parametrize(("count", "mode"), [(1, "host"), (4, "whole")])
def test_more_ends_than_kernels_look_for(count: int, mode: str) -> None:
    sampling = Sampling(max_tokens=9, min_tokens=2, stop_ids=tuple(range(ENDS + 2)))
    rows: Any = [SimpleNamespace(request=SimpleNamespace(sampling=sampling), length=10 + count, count=count)]
    assert sampling_mode(rows, lambda: True, 2) == mode
    assert Cuts.of(rows, 2).until_B.tolist() == [12]


def test_consecutive_tokens_and_samples_are_independent() -> None:
    policy, logits = forgetful_policy()
    found = run(policy, [Request(("x",), np.arange(1, 4), Sampling(max_tokens=9, ignore_eos=True), n=700)],
                max_sequences=350, cache_tokens=16384)  # fmt: skip
    order = logits.softmax(-1).argsort(descending=True).numpy()
    rank = np.empty(len(order), dtype=int)
    rank[order] = np.arange(len(order))
    classes = np.array([np.digitize(rank[c.ids], [2, 6, 15, 40]) for c in found])
    p = np.bincount(classes.ravel(), minlength=5) / classes.size
    for one, other in ((classes[:, :-1], classes[:, 1:]), (classes[:-1], classes[1:])):
        table = np.zeros((5, 5))
        np.add.at(table, (one.ravel(), other.ravel()), 1)
        chi_square(table.ravel(), np.outer(p, p).ravel() * one.size)


def test_kept_mass_and_logprobs_beside_the_learner_with_cuts() -> None:
    """Cut or not, `logprobs` are the learner's."""
    policy = exact_policy()
    prompt = np.arange(1, 30)
    sampling = Sampling(max_tokens=10, temperature=0.7, top_p=0.7, top_k=12, min_p=0.01, ignore_eos=True)
    found = run(policy, [Request(("x",), prompt, sampling, n=4)])
    for completion in found:
        np.testing.assert_allclose(
            completion.logprobs, learner_logprobs(policy, prompt, completion.ids, 0.7), atol=1e-5
        )
        assert (completion.kept < 0).any() and (completion.sampler_logprobs <= 1e-6).all()


def test_a_repetition_penalty_equals_that_of_generate() -> None:
    policy = exact_policy(tied=True)
    prompt = np.arange(1, 30)
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, repetition_penalty=2.0)
    (found,) = run(policy, [Request(("a",), prompt, sampling)])
    theirs = policy.causal.generate(
        torch.from_numpy(prompt)[None], do_sample=False, max_new_tokens=12, repetition_penalty=2.0, eos_token_id=-1
    )[0, len(prompt) :]
    assert found.ids.tolist() == theirs.tolist()


def test_a_repetition_penalty_joins_no_tokens_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen is kept from step to step: how often all tokens are joined does not depend on their number."""
    policy, joined = exact_policy(tied=True), []
    join = Sequence.tokens.fget
    monkeypatch.setattr(Sequence, "tokens", property(lambda self: (joined.append(self.count), join(self))[1]))
    counts, prompt = [], np.array([5, 5, 9, 5])
    for longest in (14, 24):
        sampling = Sampling(max_tokens=longest, ignore_eos=True, repetition_penalty=1.5)
        sequence = Sequence(Request(("a",), prompt, sampling), 0, 1, longest, frozenset(), None, [(0, 0)])
        assert sorted(sequence.seen_ids()) == [5, 9]
        joined.clear()
        (found,) = run(policy, [Request(("a",), prompt, sampling)])
        counts.append(len(joined))
        for start in range(0, longest, 3):
            part = found.ids[start : start + 3]
            read = Readback(part[None], part[None], part[None])
            sequence.accept(History(read, sequence.history, start), 0, False, 1.0)
            assert sorted(sequence.seen_ids()) == sorted({5, 9, *found.ids[: start + 3].tolist()})
    assert counts[0] == counts[1] > 0


def test_a_stream_has_every_token_once_and_in_order() -> None:
    policy, _ = forgetful_policy()
    engine = engine_of(policy, cache_tokens=256)
    heard: dict[tuple[object, int], list[int]] = {}
    requests = [Request((i,), np.arange(1, 30), Sampling(max_tokens=30), n=3, stream=i > 0) for i in range(3)]
    found: list[Completion] = generate(engine, requests)
    assert engine.scheduler.preemptions > 0
    for new in engine.new_tokens:
        heard.setdefault((new.key, new.sample), []).extend(new.ids.tolist())
    assert heard == {(c.key, c.sample): c.ids.tolist() for c in found if c.key != (0,)}
    assert engine.sampled_tokens == sum(len(c.ids) for c in found)


# --- noise ---------------------------------------------------------------------------------------------------------


def unmix(x: int) -> int:
    """The inverse of `mix`, step by step."""
    x ^= x >> 16
    x = x * pow(SECOND, -1, 2**32) & MASK
    x ^= (x >> 15) ^ (x >> 30)
    x = x * pow(FIRST, -1, 2**32) & MASK
    return x ^ (x >> 16)


def test_mix_is_a_bijection() -> None:
    numbers = [*range(300), *(2**i for i in range(32)), *(MASK - i for i in range(300)), 0x12345678, 0xDEADBEEF]
    assert [unmix(x) for x in mix(torch.tensor(numbers)).tolist()] == numbers
    assert len(mix(torch.arange(2**20)).unique()) == 2**20


def uniforms(keys: list[int], positions: list[int], vocabulary: int) -> np.ndarray:
    """(keys, positions, tokens); Gumbel noise taken back to uniform numbers."""
    rows = split_key([key for key in keys for _ in positions])
    places = torch.tensor(positions * len(keys))
    noise = gumbel(row_seeds(rows, places), vocabulary).double()
    return torch.exp(-torch.exp(-noise)).numpy().reshape(len(keys), len(positions), vocabulary)


@pytest.mark.parametrize(
    "keys",
    [
        [random_key(0, "grpo", 5, "sample", i) for i in range(24)],
        [(0x0BADF00D << 32) + i for i in range(24)],
        [(i + 1 << 32) + 0x1234567 for i in range(24)],
    ],
    ids=["as used", "same high", "same low"],
)
def test_noise_is_uniform_and_independent_even_for_keys_that_are_alike(keys: list[int]) -> None:
    u = uniforms(keys, list(range(100, 124)), 300)
    assert u.min() > 0 and u.max() < 1
    cells = np.bincount((u.ravel() * 200).astype(int), minlength=200).astype(float)
    chi_square(cells, np.full(200, u.size / 200))
    pairs = {
        "keys": (u[:-1], u[1:]),
        "positions": (u[:, :-1], u[:, 1:]),
        "tokens": (u[:, :, :-1], u[:, :, 1:]),
        "diagonal": (u[:-1, :-1], u[1:, 1:]),
        "far tokens": (u[:, :, :-64], u[:, :, 64:]),
    }
    for name, (one, other) in pairs.items():
        one, other = one.ravel(), other.ravel()
        correlation = np.corrcoef(one, other)[0, 1]
        assert abs(correlation) < 5 / np.sqrt(len(one)), name
        table = np.bincount((one * 8).astype(int) * 8 + (other * 8).astype(int), minlength=64).astype(float)
        chi_square(table, np.full(64, len(one) / 64))


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = gumbel(row_seeds(split_key([3, 2**63 + 5]), torch.tensor([0, 70000])), 100_000).double()
    assert noise.dtype == torch.float64 and noise.isfinite().all()
    assert abs(noise.mean().item() - np.euler_gamma) < 0.015
    assert abs(noise.var().item() - np.pi**2 / 6) < 0.03
