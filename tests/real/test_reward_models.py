"""Reward models with published tokenizers: each text gets the score that transformers computes for it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from lemma.core.types import Message, Problem
from lemma.rewards import RewardInput, make_reward
from tests.real.conftest import Speaker

LLAMA = ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct")
# Whose tokenizer and template, and what the configuration says is padding: nothing, the end token, or no token at all.
PARTS = [
    (LLAMA, None),
    (LLAMA, "end"),
    (("llama-bpe", ""), None),
    (("smollm2", None), -1),
    (("phi-3", "microsoft-Phi-3.5-mini-instruct"), None),
]
COMPLETIONS = ("It is 4.", "Two and two are four, as everybody knows.", "4", "")


@pytest.mark.parametrize(("speaker", "padding"), PARTS, indirect=["speaker"])
def test_scores_are_those_of_transformers(speaker: Speaker, padding: Any, tmp_path: Path) -> None:
    tokenizer = speaker.tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.eos_token_id if padding == "end" else None, initializer_range=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    if padding == -1:
        edit = tmp_path / "config.json"
        edit.write_text(edit.read_text().replace('"pad_token_id": null', '"pad_token_id": -1'))
    problem = Problem((Message("user", "What is 2 + 2?"),))
    scores = make_reward({"name": "reward_model", "path": str(tmp_path), "device": "cpu"}).score_all(
        [RewardInput(completion, problem) for completion in COMPLETIONS]
    )
    for completion, score in zip(COMPLETIONS, scores, strict=True):
        if tokenizer.chat_template:
            turns = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": completion}]
            ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
        else:
            ids = tokenizer(f"What is 2 + 2?\n{completion}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert score == pytest.approx(float(model(ids).logits), abs=1e-5)
