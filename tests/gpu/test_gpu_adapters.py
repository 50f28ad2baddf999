"""LoRA adapters inside the products of an engine on a GPU, beside a product for each layer and adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lemma.core.types import Trajectory
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Request, Sampling, generate
from lemma.models import adapters, blocks, installing
from lemma.models.attention import NAME
from lemma.models.load_model import _with_lora
from lemma.models.model_options import LoraOptions
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy
from tests.gpu.test_gpu_learner import CONFIGS, SHAPE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make(kind: str, dtype: torch.dtype, rank: int) -> Policy:
    torch.manual_seed(0)
    with torch.device("cuda"):
        causal = AutoModelForCausalLM.from_config(CONFIGS[kind](**SHAPE), dtype=dtype, attn_implementation=NAME)
    installing.install(causal, True)
    module = _with_lora(causal, LoraOptions(r=rank), "test", 0)
    torch.manual_seed(1)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return Policy(module.eval(), None)


def gaps(policy: Policy) -> np.ndarray:
    """Between engine and learner, for every token that the engine says to forty prompts."""
    engine = NativeEngine(policy, cache_tokens=8192, share_prefixes=False)
    rng = np.random.default_rng(0)
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    work = [Request(("r", i), rng.integers(3, 1000, 5 + i), sampling) for i in range(40)]
    prompts = {request.key: request.prompt for request in work}
    said = generate(engine, work)
    rows = [
        Trajectory(
            np.concatenate([prompts[one.key], one.ids]), np.arange(len(prompts[one.key]) + 8) >= len(prompts[one.key])
        )
        for one in said
    ]
    with torch.no_grad():
        found = policy.logprobs(TokenBatch.build(rows, range(len(rows)), policy.device))
    return abs(np.concatenate([one.logprobs for one in said]) - found.float().cpu().numpy())


@pytest.mark.parametrize("rank", [16, 12])
@pytest.mark.parametrize("kind", CONFIGS)
def test_folded_adapters_add_what_the_learner_adds(kind: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(kind, torch.bfloat16, rank)
    wide, half = gaps(make(kind, torch.float32, rank)), gaps(policy)
    with torch.no_grad():
        assert adapters.folded(policy.causal.model.layers[0].mlp, ("gate_proj", "up_proj")) is not None
    monkeypatch.setattr(blocks, "folded", lambda part, names: None)
    plain = gaps(make(kind, torch.bfloat16, rank))
    assert wide.max() < 1e-4
    assert half.mean() < 1.5 * plain.mean() + 1e-4, "no less exact than a product for each adapter"
