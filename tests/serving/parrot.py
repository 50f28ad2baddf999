"""A model that always says the same: its weights are written by hand, so that after a token comes the next of a row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lemma.models.model_options import TinyOptions
from lemma.models.tiny import tiny_config, tiny_model, tiny_tokenizer

CALL = '{"name": "add", "arguments": {"a": 1}}'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
SPECIAL = "<|special|>"
CALLS = ("Assistant:", "<tool_call>", CALL, "</tool_call>", "<eos>")
TEMPLATE = (
    "{%- if tools %}{{- 'Question: ' + tools | tojson + ' ' }}{%- endif %}"
    "{%- for turn in messages %}"
    "{%- if turn['role'] in ('user', 'system') %}{{- 'User: ' + turn['content'] + ' ' }}"
    "{%- elif turn['role'] == 'tool' %}{{- 'Answer: ' + turn['content'] + ' ' }}"
    "{%- else %}{{- 'Assistant:' + turn['content'] }}"
    "{%- for call in turn['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{%- endfor %}"
    "{{- '<eos> ' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"
)


def write_parrot(folder: Path, row: Sequence[str] = CALLS) -> Path:
    """A model folder; what is said after any prompt is what follows the prompt's last token in the row."""
    tokenizer = tiny_tokenizer([word for word in row if word not in ("Assistant:", "<eos>")])
    tokenizer.add_special_tokens({"additional_special_tokens": [SPECIAL]})
    tokenizer.chat_template = TEMPLATE
    options = TinyOptions(hidden=256, layers=1, feed_forward=32, heads=2, kv_heads=1, context=256)
    config = tiny_config(options, tokenizer)
    config.tie_word_embeddings = False
    model: Any = tiny_model(config, 0)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, : config.vocab_size] = torch.eye(config.vocab_size)
        model.lm_head.weight.zero_()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        ids = tokenizer.convert_tokens_to_ids(list(row))
        for before, after in itertools.pairwise(ids):
            model.lm_head.weight[after, before] = 10.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
