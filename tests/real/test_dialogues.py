"""Conversations of clients in the templates of published models: what goes on from known ids, and what is read anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.core.errors import UserError
from lemma.formats import make_format
from lemma.formats.dialogue import Dialogue
from lemma.formats.encode import encode_text
from lemma.formats.templates import without_clock
from lemma.models.load_model import load_tokenizer
from tests.real.test_bridges import TOOL, speaking

FIRST = {"role": "user", "content": "What is 2 + 2?"}
SAID = "It is 4."
CALLED = {"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": '{"query": "pens"}'}}


@pytest.fixture(scope="module")
def llama_bpe(real: Path) -> Any:
    return load_tokenizer(str(real / "vocabularies" / "llama-bpe.gguf"))


def dialogues(tokenizer: Any, templates: dict[str, str], tools: bool = False) -> Iterator[tuple[str, Dialogue]]:
    """A dialogue in each template that writes one, one after the other."""
    for name, template in templates.items():
        dialogue = Dialogue(make_format("own"), speaking(tokenizer, template), ())
        with suppress(UserError):
            dialogue.prompt([FIRST], [TOOL.as_dict()] if tools else [])
            yield name, dialogue


def going_on(dialogue: Dialogue, said: str, new: list[dict[str, Any]], tools: list[Any]) -> str | None:
    """A conversation by recorded ids, in words; None where the template does not say what stands between."""
    end = dialogue.tokenizer.eos_token_id
    ids = np.array([*dialogue.encode(said), end])
    bridge = dialogue.after(ids, new, tools)
    if bridge is None:
        return None
    return dialogue.decode([*dialogue.prompt([FIRST], tools).tolist(), *ids.tolist(), *bridge.tolist()])


def test_what_goes_on_is_what_the_template_would_have_written(llama_bpe: Any, templates: dict[str, str]) -> None:
    same = []
    for name, dialogue in dialogues(llama_bpe, templates):
        new = [{"role": "user", "content": "And 3 + 3?"}]
        words = going_on(dialogue, SAID, new, [])
        assert words is not None, name
        assert words.count("2 + 2") == words.count(SAID) == words.count("3 + 3") == 1, name
        anew = dialogue.decode(dialogue.prompt([FIRST, {"role": "assistant", "content": SAID}, *new]).tolist())
        assert words.rpartition(SAID)[2].split() == anew.rpartition(SAID)[2].split(), name
        same += [name] if words.split() == anew.split() else []
    # The others, of thinking models, write a turn that is over otherwise than one that is being said.
    assert len(same) >= 8, same


def test_special_tokens_of_others_are_only_spelled(llama_bpe: Any, templates: dict[str, str]) -> None:
    for name, dialogue in dialogues(llama_bpe, templates):
        special = dialogue.tokenizer.eos_token
        quiet = dialogue.prompt([{"role": "user", "content": "a b"}])
        loud = dialogue.prompt([{"role": "user", "content": f"a {special} b"}])
        end = dialogue.tokenizer.eos_token_id
        assert (loud == end).sum() == (quiet == end).sum(), name
        assert f"a {special} b" in dialogue.decode(loud.tolist()), name


@pytest.mark.parametrize(
    "name",
    ["Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"],
)
def test_tools_are_written_as_their_models_know_them(name: str, llama_bpe: Any, templates: dict[str, str]) -> None:
    ((_, dialogue),) = dialogues(llama_bpe, {name: templates[name]}, tools=True)
    tools = [TOOL.as_dict()]
    special = dialogue.tokenizer.eos_token
    answer = {"role": "tool", "content": f'7 "{special}"', "name": "search", "tool_call_id": "abcdefghi"}
    words = going_on(dialogue, "CALL", [answer], tools)
    assert words is not None and words.count("Look something up") == 1 and special in words.rpartition("CALL")[2]
    asked = [FIRST, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, answer]
    anew = dialogue.decode(dialogue.prompt(asked, tools).tolist())
    assert '"query": "pens"' in anew and '\\"query' not in anew
    tail = anew.rpartition("pens")[2]
    assert words.endswith(tail[tail.index("7") - 1 :]), "what a tool says is quoted alike"


def test_a_template_that_leaves_tools_out_says_so(llama_bpe: Any, templates: dict[str, str]) -> None:
    lost = 0
    for _, dialogue in dialogues(llama_bpe, templates):
        turns = [
            FIRST,
            {"role": "assistant", "content": "x", "tool_calls": [CALLED]},
            {"role": "tool", "content": "SEEN"},
        ]
        try:
            assert "SEEN" in dialogue.decode(dialogue.prompt(turns, []).tolist())
        except UserError as error:
            lost += "leaves out" in str(error)
    assert lost >= 1


@pytest.mark.parametrize("begun", ["It is", " It is\n\nfour, ", "It", "<think>\n2 + 2", "<think>2 + 2</think>\nIt is"])
def test_an_answer_that_was_begun_is_continued_as_by_transformers(
    begun: str, llama_bpe: Any, templates: dict[str, str]
) -> None:
    continued, refused = 0, []
    for name, dialogue in dialogues(llama_bpe, templates):
        tokenizer, turns = dialogue.tokenizer, [FIRST, {"role": "assistant", "content": begun}]
        nothing = dialogue.prompt([FIRST, {"role": "assistant", "content": "\n"}], continues=True)
        assert nothing.tolist() == dialogue.prompt([FIRST]).tolist()
        fixed = without_clock(tokenizer.chat_template)
        try:
            ids = dialogue.prompt(turns, continues=True)
        except UserError as error:
            assert "cannot be continued" in str(error)
            refused.append(name)
            with pytest.raises(ValueError, match="does not appear"):
                tokenizer.apply_chat_template(turns, chat_template=fixed, continue_final_message=True, tokenize=False)
            continue
        text = tokenizer.apply_chat_template(turns, chat_template=fixed, continue_final_message=True, tokenize=False)
        assert dialogue.decode(ids) == text, name
        assert ids.tolist() == encode_text(text, tokenizer), name
        assert text.rstrip().endswith(begun.strip())
        continued += 1
    assert continued >= 10, refused
    assert all("eepseek" in name for name in refused), refused
    assert bool(refused) == ("</think>" in begun), refused
