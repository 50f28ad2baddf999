"""4-bit weights of a model whose layers are narrower than the blocks that bitsandbytes' CPU kernel wants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lemma.core.types import Trajectory
from lemma.models.load_model import build_policy, load_tokenizer
from lemma.models.model_options import LoraOptions, ModelOptions
from lemma.models.packing import TokenBatch

pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_narrow_model_learns_and_scores_in_four_bits(precision: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny")
    config = Qwen2Config(
        hidden_size=18, intermediate_size=27, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3,
        vocab_size=len(tokenizer), max_position_embeddings=64,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = ModelOptions(path=str(tmp_path), quantize="4bit", precision=precision, lora=LoraOptions(r=2))
    policy = build_policy(options, torch.device("cpu"), 0)
    batch = TokenBatch.build([Trajectory(np.arange(8), np.arange(8) >= 3)], [0], policy.device)
    learnt = policy.logprobs(batch)
    learnt.sum().backward()
    policy.module.eval()
    with torch.no_grad():
        scored = policy.logprobs(batch)
    torch.testing.assert_close(scored, learnt.detach())
