"""The cache that the plan of an update leaves room for, on one rank and on several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from lemma.core.ranks import RankWorld, joined
from lemma.engines.native import sizes
from lemma.engines.native.engine import BLOCK
from lemma.models.model_options import ModelOptions
from lemma.runs import fitted
from lemma.stages.reinforcement.rl_options import ReinforcementOptions

SEVEN = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip


def tokens(monkeypatch: pytest.MonkeyPatch, ranks: int, shard: str) -> int:
    """Of a million that are wanted on GPUs of 141 GiB, in full training of a 7B model."""
    monkeypatch.setattr(sizes, "bytes_per_token", lambda policy: 57344)
    properties = SimpleNamespace(total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    policy: Any = SimpleNamespace(
        device=torch.device("cuda"), causal=SimpleNamespace(config=SEVEN), recomputed=0, is_adapter=False
    )
    stage: Any = SimpleNamespace(model=ModelOptions(path="seven", precision="bf16"), shard=shard)
    options = ReinforcementOptions.model_validate({"algorithm": {"name": "grpo"}, "data": {"source": "arithmetic"}})
    with joined(RankWorld(0, ranks, ranks)):
        return fitted.cache_tokens(stage, options, policy, 1_000_000, 8192)


def test_a_split_optimiser_leaves_room_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tokens(monkeypatch, 1, "none")
    assert alone == BLOCK, "18 bytes for each of 7.6 billion parameters leave nothing"
    assert 400_000 < tokens(monkeypatch, 8, "optimiser") < tokens(monkeypatch, 64, "optimiser")
