"""The probes on real weights: sound models pass in every precision, planted faults do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lemma.core.errors import UserError
from lemma.engines.native import engine_probe
from lemma.engines.protocol import EngineError
from lemma.models.load_model import build_policy, load_policy
from lemma.models.model_options import LoraOptions, ModelOptions
from lemma.models.policy import Policy
from lemma.models.probe import ProbeReport
from tests.real.faults import ENGINE_FAULTS, FAULTS


@pytest.fixture(scope="module")
def policy(smollm2: Path) -> Policy:
    """In float32, which a CPU computes fastest."""
    return load_policy(str(smollm2), "cpu", "fp32")


def test_real_weights_pass_in_float32(policy: Policy) -> None:
    assert policy.findings == ProbeReport(None, 0.0)
    engine_probe.probe(policy)


def test_real_weights_pass_in_bf16_with_an_adapter_and_nothing_of_them_moves(smollm2: Path) -> None:
    options = ModelOptions(path=str(smollm2), precision="bf16", lora=LoraOptions(r=4))
    policy = build_policy(options, torch.device("cpu"), seed=0)
    before = {name: (p.data_ptr(), p.dtype) for name, p in policy.module.named_parameters()}
    engine_probe.probe(policy)
    assert {name: (p.data_ptr(), p.dtype) for name, p in policy.module.named_parameters()} == before
    # Peaked distributions: random weights of this shape round by a tenth of that.
    assert 0.01 < policy.findings.rounding < 0.2


def test_real_weights_pass_in_four_bits(smollm2: Path) -> None:
    options = ModelOptions(path=str(smollm2), quantize="4bit", precision="bf16", lora=LoraOptions(r=4))
    policy = build_policy(options, torch.device("cpu"), seed=0)
    assert policy.findings.reason is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_and_located(fault: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, where = FAULTS[fault]
    plant(policy, monkeypatch)
    monkeypatch.delitem(policy.__dict__, "findings", raising=False)
    with pytest.raises(UserError, match=r"the learner cannot train LlamaForCausalLM: .*off by .* on average") as caught:
        policy.probe()
    assert where in str(caught.value)


@pytest.mark.parametrize("fault", ["a stale block of the cache", "rotation off by one"])
def test_the_engine_refuses_what_its_cache_gets_wrong(
    fault: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them; tests/gpu has all."""
    ENGINE_FAULTS[fault](policy, monkeypatch)
    monkeypatch.setitem(policy.__dict__, "findings", ProbeReport(None))
    with pytest.raises(EngineError, match=r"through an engine's cache, .*off by .* on average"):
        engine_probe.probe(policy)
