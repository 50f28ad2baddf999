"""Cuts of the support against transformers' own, and the mass that is left."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lemma.engines.protocol import Sampling
from lemma.engines.sampling import cut, logprobs, penalise

PLAIN = Sampling(max_tokens=1)


def theirs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(torch.zeros(len(logits), 1, dtype=torch.long), logits)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_cuts_equal_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = replace(PLAIN, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    masked, kept = cut(logits, sampling)
    torch.testing.assert_close(masked, theirs(logits, sampling))
    p = (logits / temperature).softmax(-1)
    mass = torch.where(masked.isfinite(), p, 0.0).sum(-1)
    torch.testing.assert_close(kept.exp(), mass)
    assert (kept <= 0).all()
    # What is drawn from has the log-probability that the difference says.
    ids = masked.argmax(-1)
    behaviour = masked.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs(logits, ids, temperature) - kept, behaviour)


def test_by_hand() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    for sampling, mass, left in (
        (replace(PLAIN, top_k=2), 0.8, 2),
        (replace(PLAIN, top_p=0.6), 0.8, 2),
        (replace(PLAIN, top_p=0.3), 0.5, 1),
        (replace(PLAIN, min_p=0.25), 0.95, 3),
        (replace(PLAIN, top_k=3, top_p=0.8), 0.8, 2),
        (PLAIN, 1.0, 4),
    ):
        masked, kept = cut(p.log(), sampling)
        assert int(masked.isfinite().sum()) == left
        assert math.isclose(kept.exp().item(), mass)


def test_forbidden_tokens_count_as_cut() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    masked, kept = cut(p.log(), PLAIN, forbidden=[0])
    assert masked[0, 0] == -math.inf
    assert math.isclose(kept.exp().item(), 0.5)
    masked, _ = cut(p.log(), replace(PLAIN, temperature=0.0), forbidden=[0])
    assert masked.argmax().item() == 1


def test_temperature_zero_is_plain_and_cuts_nothing() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    masked, kept = cut(logits, replace(PLAIN, temperature=0.0, top_k=1, top_p=0.1))
    torch.testing.assert_close(masked, logits)
    assert (kept == 0).all()
    torch.testing.assert_close(logprobs(logits, logits.argmax(-1), 0.0), logits.log_softmax(-1).amax(-1))


def test_nothing_cut_is_exactly_zero_and_logits_are_not_touched() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(2)).bfloat16()
    before = logits.clone()
    masked, kept = cut(logits, replace(PLAIN, top_k=2))
    assert masked.dtype == kept.dtype == torch.float32
    assert torch.equal(logits, before)
    assert (cut(logits, PLAIN)[1] == 0).all()


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(3))
    seen = torch.tensor([3, 5, 5, 11])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen[None], logits.clone())[0]
    torch.testing.assert_close(penalise(logits[0], seen, penalty), expected)
