"""Which tokens of a conversation are learnt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, Message, Problem, Trajectory
from lemma.formats import FORMATS, make_format
from lemma.formats.encode import encode_demonstration
from lemma.formats.turns import encode_turns
from tests.formats.tokenizers_made_here import make_spacing_tokenizer, make_tokenizer

SAID = (Message("user", "a"), Message("assistant", "b c"), Message("user", "so"))
ITEM = Demonstration(Problem(SAID), response="in", turns_from=0)
THINKING = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
    "{{ m['content'].split('</think>')[-1] }}</s>{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)


def learnt(path: Trajectory, tokenizer: Any) -> list[str]:
    """The learnt parts of a sequence as text."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], path.loss_mask_T.astype(int), [0]])))
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return [tokenizer.decode(path.ids_T[a:b], skip_special_tokens=False) for a, b in pairs]


def test_every_turn_is_learnt_with_its_end_and_nothing_else() -> None:
    tokenizer = make_tokenizer()
    [path] = encode_turns(make_format("own"), ITEM, tokenizer)
    assert learnt(path, tokenizer) == ["b c</s>", "in</s>"]
    [last] = encode_turns(make_format("own"), ITEM, tokenizer, "last")
    assert learnt(last, tokenizer) == ["in</s>"]
    assert tokenizer.decode(path.ids_T) == tokenizer.decode(last.ids_T)


def test_turns_of_the_prompt_are_not_learnt() -> None:
    tokenizer = make_tokenizer()
    said = (*SAID, Message("assistant", "d"), Message("user", "b"))
    [path] = encode_turns(make_format("own"), Demonstration(Problem(said), response="in", turns_from=3), tokenizer)
    assert learnt(path, tokenizer) == ["d</s>", "in</s>"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["plain", "with_bos", "with_bos_of_turns", "with_template"])
def test_each_turn_is_learnt_behind_what_the_model_would_see(name: str, kind: str, tokenizers: dict[str, Any]) -> None:
    """One sequence or several: what stands before a learnt turn is the prompt of the conversation up to there."""
    fmt, tokenizer = make_format(name), tokenizers[kind]
    paths = encode_turns(fmt, ITEM, tokenizer)
    seen = []
    for path in paths:
        for place in np.flatnonzero(np.diff(path.loss_mask_T.astype(int)) == 1) + 1:
            seen.append(tokenizer.decode(path.ids_T[:place], skip_special_tokens=False))
    asked = [fmt.prompt(Problem(SAID[:1]), tokenizer), fmt.prompt(Problem(SAID), tokenizer)]
    assert seen == asked
    assert [learnt(path, tokenizer)[-1] for path in paths][-1] == "in</s>"


def test_a_template_that_rewrites_finished_turns_gives_a_sequence_for_each() -> None:
    tokenizer = make_tokenizer(template=THINKING)
    item = Demonstration(
        Problem((SAID[0], Message("assistant", "<think>x</think>b"), SAID[2])),
        response="y</think>in",
        turns_from=0,
    )
    first, second = encode_turns(make_format("own"), item, tokenizer)
    assert learnt(first, tokenizer) == ["x</think>b</s>"] and learnt(second, tokenizer) == ["y</think>in</s>"]
    assert "x" not in tokenizer.decode(second.ids_T)


def test_a_conversation_is_tokenised_as_one_text_by_tokenizers_that_add_spaces() -> None:
    tokenizer, fmt = make_spacing_tokenizer(), make_format("own")
    [path] = encode_turns(fmt, ITEM, tokenizer)
    text = fmt.prompt(ITEM.problem, tokenizer) + "in"
    assert tokenizer.decode(path.ids_T[:-1]) == tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))


def test_one_turn_is_what_it_was() -> None:
    tokenizer, fmt = make_tokenizer(), make_format("r1_zero")
    item = Demonstration(Problem(SAID[:1]), response=" b </think> <answer> 4 </answer>", turns_from=0)
    [path] = encode_turns(fmt, item, tokenizer)
    plain = encode_demonstration(fmt, item, tokenizer)
    assert np.array_equal(path.ids_T, plain.ids_T) and np.array_equal(path.loss_mask_T, plain.loss_mask_T)


def test_plain_text_is_learnt_whole() -> None:
    item = Demonstration(Problem((Message("user", "b in"),)), response="b in", prompt="")
    for tokenizer, start in ((make_tokenizer(), 1), (make_tokenizer(bos=True), 1)):
        [path] = encode_turns(make_format("own"), item, tokenizer)
        assert path.loss_mask_T[start:].all() and not path.loss_mask_T[0]
        assert tokenizer.decode(path.ids_T).removeprefix("<s>") == "b in</s>"


def test_formats_without_tools_say_so() -> None:
    calls = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
    item = Demonstration(Problem((SAID[0], Message("assistant", "", calls), Message("tool", "4"))), response="4")
    with pytest.raises(UserError, match=r"format r1_zero cannot show the tools of problem .*; write `format: chat`"):
        encode_turns(make_format("r1_zero"), item, make_tokenizer())
