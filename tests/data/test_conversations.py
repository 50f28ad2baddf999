"""Rows that other trainers take: completions, conversations, tools, plain text, columns of any name."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from lemma.core.errors import LemmaWarning, UserError
from lemma.core.types import Demonstration, Message, Problem
from lemma.data.data_options import DataOptions
from lemma.data.load_rows import load_demonstrations, load_problems
from lemma.data.prepared import item_rows, write_rows

ASK, SAY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = [
    ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "4"},
    SAY,
]


def load(tmp_path, *rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_demonstrations(DataOptions(source=str(path), **options), seed=0)


def refused(tmp_path, *rows, load=load, **options):
    with pytest.raises(UserError) as caught:
        load(tmp_path, *rows, **options)
    return str(caught.value)


def test_completions_are_text_or_the_messages_that_follow(tmp_path):
    [text] = load(tmp_path, {"prompt": "2+2?", "completion": "4"})
    assert (text.problem.question, text.response, text.turns_from) == ("2+2?", "4", None)
    [said] = load(tmp_path, {"prompt": [ASK, SAY, ASK], "completion": [SAY]})
    assert len(said.problem.messages) == 3 and said.response == "4" and said.turns_from == 3
    assert "the column 'completion' is missing" in refused(
        tmp_path, {"prompt": "2+2?", "completion": "4"}, {"prompt": "2+2?"}
    )


def test_conversations_are_learnt_from_the_first_turn(tmp_path):
    [item] = load(tmp_path, {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}] * 2})
    assert [message.role for message in item.problem.messages] == ["user", "assistant", "user"]
    assert item.turns_from == 0
    [item] = load(tmp_path, {"system": "Add.", "messages": [ASK, SAY]})
    assert item.problem.system == "Add."


def test_thoughts_that_messages_keep_apart_are_written_in_tags(tmp_path):
    [item] = load(tmp_path, {"messages": [ASK, {**SAY, "reasoning_content": "two twos"}]})
    assert item.response == "<think>\ntwo twos\n</think>\n\n4"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text in jsonl"])
def test_tool_calls_and_tools_arrive_as_templates_want_them(tmp_path, kind):
    other = {"type": "function", "function": {"name": "look", "arguments": {"word": "x"}}}
    row = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [other]}, *WITH_TOOLS[1:]]}
    row["tools"] = [TOOL]
    path = tmp_path / ("rows.parquet" if kind == "parquet" else "rows.jsonl")
    if kind == "parquet":  # a table gives every call the arguments of all others, null
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        if kind != "jsonl":
            row["tools"] = json.dumps([TOOL])
            row["messages"][2] = {"role": "assistant", "tool_calls": [json.loads(json.dumps(CALL))]}
            row["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "b": 2}'
        path.write_text(json.dumps(row) + "\n")
    [item] = load_demonstrations(DataOptions(source=str(path)), seed=0)
    assert item.problem.messages[1].more == {"tool_calls": [other]}
    assert item.problem.messages[2] == Message("assistant", "", {"tool_calls": [CALL]})
    assert item.problem.messages[3] == Message("tool", "4", {"name": "add"})
    assert item.problem.extra["tools"][0]["function"]["name"] == "add"


def test_a_conversation_may_end_with_a_tool_call_and_survives_being_written(tmp_path):
    [item] = load(tmp_path, {"messages": WITH_TOOLS[:2], "tools": [TOOL]})
    assert item.response == "" and item.more == {"tool_calls": [CALL]}
    for name in ("out.parquet", "out.jsonl"):
        write_rows(tmp_path / name, item_rows([item]))
        assert load_demonstrations(DataOptions(source=str(tmp_path / name)), seed=0) == [item]
    write_rows(tmp_path / "text.jsonl", item_rows(load(tmp_path, {"text": "All of this."})))
    [text] = load_demonstrations(DataOptions(source=str(tmp_path / "text.jsonl")), seed=0)
    assert text.prompt == "" and text.response == "All of this."


def test_wrong_tool_calls_are_named(tmp_path):
    bad = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}
    assert "the arguments of a tool call of the column 'messages' are not JSON" in refused(
        tmp_path, {"messages": [ASK, bad]}
    )
    assert "names no function" in refused(tmp_path, {"messages": [ASK, {**bad, "tool_calls": [{"function": {}}]}]})


def test_problems_with_other_tool_calls_have_other_names():
    said = [Problem((Message("user", "?"), Message("assistant", "", {"tool_calls": [n]}))) for n in (1, 2)]
    assert said[0].id != said[1].id
    assert Problem((Message("user", "?"),)).id == Problem((Message("user", "?", {}),)).id


def test_columns_of_other_names(tmp_path):
    row = {"Query": "2+2?", "Gold": {"text": "4"}, "Rationale": "two twos"}
    names = {"question": "Query", "answer": "Gold.text", "reasoning": "Rationale"}
    [item] = load(tmp_path, row, columns=names)
    assert item == Demonstration(item.problem, reasoning="two twos", answer="4") and item.problem.golds == ("4",)


def test_sentences_name_the_columns_of_the_file(tmp_path):
    row = {"Query": "2+2?", "Gold": "4", "Rationale": "two twos"}
    said = refused(tmp_path, row)
    assert "`columns: {question: Query, answer: Gold, reasoning: Rationale}`" in said and "reader" not in said
    names = {"question": "Query", "answer": "Gold"}
    said = refused(tmp_path, row, {**row, "Gold": None}, columns=names)
    assert "rows.jsonl:2: the column 'Gold' is null (columns: Query, Gold, Rationale)" in said
    said = refused(tmp_path, row, columns={"question": "Qurey"})
    assert "there is no column 'Qurey'" in said and "did you mean 'Query'" in said
    said = refused(tmp_path, {"prompt": "2+2?", "completion": "4"}, load=problems)
    assert "lacks an answer to grade against" in said and "`columns: {answer: NAME}`" in said


def problems(tmp_path, *rows):
    load(tmp_path, *rows)
    return load_problems(DataOptions(source=str(tmp_path / "rows.jsonl")), seed=0)


def test_verbatim_prompts_are_asked_for(tmp_path):
    row = {"prompt": "Q: 2+2?\nA:", "response": "4"}
    assert load(tmp_path, row)[0].prompt is None
    assert load(tmp_path, row, verbatim=True)[0].prompt == "Q: 2+2?\nA:"
    assert "`verbatim` wants prompts of text" in refused(tmp_path, {"messages": [ASK, SAY, ASK, SAY]}, verbatim=True)


@pytest.mark.parametrize("prompt", ["<|im_start|>user\n2+2?", "User: 2+2?\nAssistant: <think>", "[INST] 2+2? [/INST]"])
def test_prompts_that_hold_a_template_already_are_told(tmp_path, prompt, recwarn):
    row = {"prompt": prompt, "response": "4"}
    load(tmp_path, row, verbatim=True)
    assert not recwarn.list
    with pytest.warns(LemmaWarning, match="look whole .*and the format writes its own.*verbatim: true"):
        load(tmp_path, row)
