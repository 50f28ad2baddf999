"""A real GGUF file, SmolLM2 in 4 bits, beside the folder that transformers made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from lemma.engines.stop_strings import ends_of
from lemma.models.load_model import load_policy
from lemma.models.policy import Policy
from tests.real.conftest import read_vocabulary


@pytest.fixture(scope="module")
def policy(smollm2_gguf: Path) -> Policy:
    return load_policy(str(smollm2_gguf), "cpu", "bf16")


def test_the_weights_are_the_same_to_the_bit(policy: Policy, smollm2: Path) -> None:
    theirs, mine = load_file(smollm2 / "model.safetensors"), policy.causal.state_dict()
    assert len(theirs) == 272
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert mine["lm_head.weight"].data_ptr() == mine["model.embed_tokens.weight"].data_ptr()


def test_the_tokenizer_is_the_published_one(policy: Policy, smollm2: Path, real: Path) -> None:
    theirs, mine = AutoTokenizer.from_pretrained(smollm2), policy.tokenizer
    for text, _ in read_vocabulary(real / "vocabularies" / "gpt-2.gguf").samples:
        assert mine.encode(text) == theirs.encode(text), text
        assert mine.decode(mine.encode(text)) == text
    turns = [{"role": "user", "content": "12  + 30?"}]
    asked = [one.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for one in (mine, theirs)]
    assert asked[0] == asked[1]
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.model_max_length == 8192


def test_it_ends_and_is_saved_as_a_plain_model(policy: Policy) -> None:
    assert ends_of(policy) == {2}
    config = policy.causal.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert getattr(config, "quantization_config", None) is None
    assert not getattr(policy.causal, "is_quantized", False)


def test_it_answers(policy: Policy) -> None:
    turns = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    asked = policy.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    said = policy.causal.generate(asked, max_new_tokens=12, do_sample=False)[0, asked.shape[1] :]
    assert "Paris" in policy.tokenizer.decode(said)
