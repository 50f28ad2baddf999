"""Families that Lemma takes, on a GPU: kernels, graphs and variable-length attention beside the model's own forward."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from lemma.core.errors import UserError
from lemma.engines.native.engine import NativeEngine
from lemma.engines.native.engine_probe import probe
from lemma.engines.protocol import EngineError, Sampling, generate
from tests.engines.native_checks import requests_of
from tests.engines.small_policies import worst_difference
from tests.models.families import LEARNER_ONLY, REFUSED, TAKEN, family_policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", TAKEN)
def test_both_probes_pass(kind: str, precision: str) -> None:
    policy = family_policy(kind, TAKEN[kind], DTYPES[precision], "cuda")
    policy.probe()
    probe(policy)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", LEARNER_ONLY)
def test_the_learner_passes_and_the_engine_does_not(kind: str, precision: str) -> None:
    values, reason = LEARNER_ONLY[kind]
    policy = family_policy(kind, values, DTYPES[precision], "cuda")
    policy.probe()
    with pytest.raises(EngineError, match=reason):
        probe(policy)


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_as_on_a_cpu(kind: str) -> None:
    values, reason = REFUSED[kind]
    with pytest.raises(UserError, match=reason):
        family_policy(kind, values, torch.bfloat16, "cuda").probe()


@pytest.mark.parametrize("kind", TAKEN)
def test_graphs_say_what_the_learner_says(kind: str) -> None:
    """In float32, where a captured step of decoding has no rounding to hide behind."""
    policy = family_policy(kind, TAKEN[kind], device="cuda")
    prompts = [np.arange(5, 25) * 7 % 320, np.arange(1, 4), np.arange(9, 90)]
    requests = requests_of(prompts, Sampling(max_tokens=20, ignore_eos=True), n=2)
    engine = NativeEngine(policy, cache_tokens=4096, max_sequences=8, prefill_tokens=24)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = generate(engine, requests)
    # In float32 the experts of mixtures are counted on the host.
    graphless = [str(one.message) for one in said if "cannot be decoded through CUDA graphs" in str(one.message)]
    assert bool(engine.runner.graphs.captures) != bool(graphless)
    assert not graphless or "moe" in kind or kind == "mixtral"
    assert worst_difference(policy, requests, found) < 1e-3
    engine.close()
