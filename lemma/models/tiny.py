"""The built-in model: a small Qwen3 and a word-level tokenizer made for the built-in arithmetic.

Created from nothing by a recipe and saved in the Hugging Face format like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lemma.core.random import key
from lemma.data.arithmetic import VOCABULARY
from lemma.models.model_options import TinyOptions

SPECIAL = ("<pad>", "<eos>", "<unk>")
WORDS = ("User:", "Assistant:", "<think>", "</think>", "<answer>", "</answer>", "Question:", "Answer:", "####")


def tiny_tokenizer(further: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per word; words are separated by white space, and decoding puts one space between them.

    `further` tokens need no white space around them, and may hold some.
    """
    words = [*SPECIAL, *WORDS, *(word for word in VOCABULARY if word not in WORDS)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in further])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def tiny_config(options: TinyOptions, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // 32) * 32,
        hidden_size=options.hidden,
        intermediate_size=options.feed_forward,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.hidden // options.heads,
        max_position_embeddings=options.context,
        tie_word_embeddings=True,
        initializer_range=0.02,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def tiny_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """Random weights that depend on the seed and the shape only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "tiny model"))
        return Qwen3ForCausalLM(config)
