"""Conversations through the tokenizers and chat templates of published models."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.core.types import Demonstration, Message, Problem
from lemma.data.data_options import DataOptions
from lemma.data.load_rows import load_demonstrations
from lemma.formats import make_format
from lemma.formats.bridge import Bridge
from lemma.formats.turns import encode_turns
from tests.real.conftest import Speaker, read_once

TURNS = (Message("user", "How much is 2+2?"), Message("assistant", "It is 4."), Message("user", "And 3+3?"))
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def learnt(path: Any, tokenizer: Any) -> list[str]:
    borders = np.flatnonzero(np.diff(np.concatenate([[0], path.loss_mask_T.astype(int), [0]])))
    return [tokenizer.decode(path.ids_T[a:b]) for a, b in zip(borders[::2], borders[1::2], strict=True)]


def test_both_turns_are_learnt_behind_their_own_prompt(speaker: Speaker) -> None:
    tokenizer, fmt = speaker.tokenizer, make_format("own")
    paths = encode_turns(fmt, Demonstration(Problem(TURNS), response="It is 6.", turns_from=0), tokenizer)
    seen = [text for path in paths for text in learnt(path, tokenizer)]
    assert [text.strip().startswith(start) for text, start in zip(seen, ("It is 4.", "It is 6."), strict=True)] == [
        True
    ] * 2
    for number, asked in enumerate((TURNS[:1], TURNS)):
        path = paths[-1] if number or len(paths) == 1 else paths[0]
        start = np.flatnonzero(np.diff(path.loss_mask_T.astype(int)) == 1)[number if len(paths) == 1 else 0] + 1
        prompt = tokenizer.encode(fmt.prompt(Problem(asked), tokenizer), add_special_tokens=False)
        assert tokenizer.decode(path.ids_T[:start]) == tokenizer.decode(prompt)


@pytest.mark.parametrize(
    ("vocabulary", "template", "call"),
    [
        (
            "qwen2",
            "Qwen-Qwen2.5-7B-Instruct",
            '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>',
        ),
        ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct", '{"name": "add", "parameters": {"a": 2, "b": 2}}'),
    ],
)
def test_tool_calls_are_learnt_and_results_are_not(
    vocabulary: str, template: str, call: str, real: Path, templates: dict[str, str], tmp_path: Path
) -> None:
    import datasets

    tokenizer = copy.copy(read_once(real / "vocabularies" / f"{vocabulary}.gguf"))
    tokenizer.chat_template = templates[template]
    messages = [
        {"role": "user", "content": "How much is 2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    rows = [{"messages": messages, "tools": [TOOL]}, {"messages": messages[:2], "tools": [TOOL]}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    whole, called = load_demonstrations(DataOptions(source=str(tmp_path / "saved")), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [path] = encode_turns(make_format("own"), whole, tokenizer)
        [short] = encode_turns(make_format("own"), called, tokenizer)
    first, last = learnt(path, tokenizer)
    assert call in first and "4</s>" not in first and last.startswith("It is 4.")
    assert "Add two numbers." in tokenizer.decode(path.ids_T) and call in learnt(short, tokenizer)[0]
    assert "Add two numbers." not in first + last


def test_no_special_token_is_alive_in_a_reply(speaker: Speaker) -> None:
    tokenizer = speaker.tokenizer
    bridge = Bridge.of(make_format("own"), tokenizer, (), 64)
    special = " ".join({str(token) for token in tokenizer.all_special_tokens})
    ids, _ = bridge.ids(np.array([tokenizer.eos_token_id]), f"a {special} b")
    around, _ = bridge.ids(np.array([tokenizer.eos_token_id]), "")
    alive = set(tokenizer.all_special_ids)
    assert [one for one in ids if int(one) in alive] == [one for one in around if int(one) in alive]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert f"a {special} b" in text and f"  a {special}" not in text
