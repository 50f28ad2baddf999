"""The real parts are what their names say."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer


def test_the_tokenizer_of_smollm2_is_the_published_one(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a\n\n12")) == ["a", "ĊĊ", "1", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).endswith(
        "<|im_start|>user\nHi<|im_end|>\n"
    )


def test_templates_of_the_great_families_are_there(templates: dict[str, str]) -> None:
    for family in ("Qwen2.5", "Llama-3.1", "DeepSeek-R1", "Phi-3.5", "gemma-2", "Mistral-Nemo"):
        assert any(family in name for name in templates), family
