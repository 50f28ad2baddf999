"""What a few tokens do not show: windows that begin later, and positions that depend on other sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lemma.core.errors import UserError
from lemma.engines.native.engine_probe import probe
from lemma.engines.protocol import EngineError
from lemma.engines.transformers_engine import TransformersEngine
from lemma.models import installing
from lemma.models.attention import NAME
from lemma.models.packing import Segments
from lemma.models.policy import Policy
from tests.engines.small_policies import small_tokenizer

WINDOW, CONTEXT = 80, 160
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 1e4,
            "original_max_position_embeddings": 64}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}  # fmt: skip


def policy(kind: str, attention: str = NAME, **more: Any) -> Policy:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT, initializer_range=0.3, **more,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    if attention == NAME:
        installing.install(model)
    return Policy(model, small_tokenizer())


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"sliding_window": WINDOW}),
        ("mistral", {"sliding_window": WINDOW}),
        ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
        ("gemma3_text", {"sliding_window": WINDOW}),
        ("llama", {"rope_parameters": YARN}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@torch.no_grad()
def test_sequences_beyond_the_window_are_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    """Packed behind a shorter one. transformers' Llama knows no window, whatever its configuration says."""
    mine, theirs = policy(kind, **more), policy(kind, "eager", **more)
    assert mine.strangeness() is None
    mine.probe()
    ids = torch.arange(20 + 120) * 7919 % 320
    positions = torch.cat([torch.arange(20), torch.arange(120)])
    hidden = mine.hidden(ids, positions, Segments((20, 120), mine.device))[20:]
    plain = theirs.causal(input_ids=ids[None, 20:]).logits[0]
    torch.testing.assert_close(mine.head(hidden), plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "more", "sentence"),
    [
        ("llama", {"rope_parameters": LONGROPE}, "depend on the longest sequence in the pass"),
        ("llama", {"rope_parameters": DYNAMIC}, "depend on the longest sequence in the pass"),
        (
            "phimoe",
            {"sliding_window": WINDOW, **MIXTURE},
            "beyond its window of 80 tokens computed in fp32, its log-probabilities are off by",
        ),
        (
            "qwen2_moe",
            {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2, **MIXTURE},
            "beyond its window of 80 tokens computed in fp32, its log-probabilities are off by",
        ),
    ],
    ids=["longrope", "dynamic", "phimoe", "qwen2_moe"],
)
def test_what_would_be_computed_wrongly_is_refused_by_both(kind: str, more: dict[str, Any], sentence: str) -> None:
    strange = policy(kind, **more)
    with pytest.raises(UserError, match=f"the learner cannot train .*{sentence}"):
        strange.probe()
    with pytest.raises(EngineError, match=f"the native engine cannot run .*{sentence}"):
        probe(strange)


def test_the_reference_engine_gives_such_models_one_sequence_at_a_time() -> None:
    assert TransformersEngine(policy("llama", "eager", rope_parameters=LONGROPE), 0)._batch == 1
    assert TransformersEngine(policy("llama", "eager", rope_parameters=YARN), 0)._batch > 1
