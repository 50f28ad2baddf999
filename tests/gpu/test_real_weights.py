"""Real weights on a GPU: SmolLM2 passes the probes in every precision, and planted faults are refused in bf16.

The weights are where `make test` puts them, or in the folder that $LEMMA_REAL_PARTS names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lemma.core.errors import UserError
from lemma.core.events import Event
from lemma.engines import open_engine
from lemma.engines.engine_options import NativeOptions
from lemma.engines.native import engine_probe
from lemma.engines.protocol import EngineError, Request, Sampling, generate
from lemma.models.load_model import build_policy, load_policy
from lemma.models.model_options import LoraOptions, ModelOptions, Precision
from lemma.models.policy import Policy
from lemma.models.probe import ProbeReport
from tests.engines.mismatch_checks import check_mismatch, mismatch
from tests.engines.small_policies import learner_logprobs
from tests.real.faults import ENGINE_FAULTS, FAULTS

SMOLLM2 = Path(os.environ.get("LEMMA_REAL_PARTS", str(Path(sys.prefix) / "real"))) / "smollm2"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not SMOLLM2.is_dir(), reason="real parts absent: `make .venv/.real` fetches them"),
]
QUESTIONS = [
    "Tom has 5 apples and buys 7 more. How many apples does he have?",
    "A train goes 60 miles in an hour. How far does it go in two and a half hours?",
    "What is the capital of France, and why is it famous?",
    "Write one sentence about the sea.",
]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_real_weights_pass(precision: Precision) -> None:
    policy = load_policy(str(SMOLLM2), "cuda", precision)
    engine_probe.probe(policy)
    assert policy.findings.reason is None


def test_adapters_pass() -> None:
    options = ModelOptions(path=str(SMOLLM2), lora=LoraOptions(r=8))
    engine_probe.probe(build_policy(options, torch.device("cuda"), seed=0))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(str(SMOLLM2), "cuda", "bf16")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_and_located(fault: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, where = FAULTS[fault]
    plant(policy, monkeypatch)
    monkeypatch.delitem(policy.__dict__, "findings", raising=False)
    with pytest.raises(UserError, match="the learner cannot train LlamaForCausalLM: ") as caught:
        policy.probe()
    assert where in str(caught.value)


@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_the_engine_refuses_what_its_cache_gets_wrong(
    fault: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ENGINE_FAULTS[fault](policy, monkeypatch)
    monkeypatch.setitem(policy.__dict__, "findings", ProbeReport(None))
    with pytest.raises(EngineError, match="through an engine's cache, "):
        engine_probe.probe(policy)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_engine_and_the_learner_agree_on_what_is_sampled(precision: Precision) -> None:
    said: list[Event] = []
    options = NativeOptions(cache_tokens=65536)
    policy, engine = open_engine(str(SMOLLM2), "cuda", 0, said.append, options, precision)
    assert engine.name == "native" and not said
    sampling = Sampling(max_tokens=120)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [policy.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    requests = [Request(("q", i), np.array(ids), sampling, n=8) for i, ids in enumerate(prompts)]
    found = generate(engine, requests)
    theirs = [learner_logprobs(policy, requests[c.key[1]].prompt, c.ids) for c in found]
    gap = mismatch(found, theirs)
    print(f"{precision}: {gap.tokens} tokens, mean {gap.mean:.2g}, largest {gap.largest:.2g}, "
          f"rounding {policy.findings.rounding:.2g}")  # fmt: skip
    check_mismatch(gap, precision, rounding=policy.findings.rounding)


def test_four_bits_pass() -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    options = ModelOptions(path=str(SMOLLM2), quantize="4bit", precision="bf16", lora=LoraOptions(r=4))
    policy = build_policy(options, torch.device("cuda"), seed=0)
    engine_probe.probe(policy)
    assert policy.findings.reason is None
