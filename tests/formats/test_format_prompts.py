"""Prompts: what each format renders, whose system message counts, and templates that survive saving and reloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.formats import FORMATS, Format, make_format
from lemma.formats.templates import quote, render
from tests.formats.tokenizers_made_here import KINDS, THEIR_TEMPLATE, make_tokenizer

QUESTION = "What is {x} in {{ x }} {% if %} {# 2 #} \\n '\"` 🙂?"
NASTY = 'It\'s "quoted" {{ braces }} {% raw %} {# hash #} }} %} \\n \\u0041 \\\n\ttab\r\n ½ 数 🙂\u2028</s> \x01 end \\'
PROBLEM = Problem((Message("user", QUESTION),))
INSTRUCTED = Problem((Message("system", "Theirs"), Message("user", QUESTION)))
CONVERSATION = Problem(
    (Message("user", "One?"), Message("assistant", "1"), Message("user", "And {another}?")),
)


def as_messages(problem: Problem) -> list[dict[str, str]]:
    return [message.as_dict() for message in problem.messages]


def reloaded(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Any:
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_the_prompts_of_all_formats(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    plain = tokenizers["plain"]

    def prompt(name: str, **options: Any) -> str:
        return make_format({"name": name, "system": "Sys", **options}).prompt(PROBLEM, plain)

    turns = f"<|im_start|>system\nSys<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt("r1_zero") == f"Sys\nUser: {QUESTION}\nAssistant: <think>"
    assert prompt("r1_zero", system=None, preamble=False) == f"User: {QUESTION}\nAssistant: <think>"
    assert prompt("question_only") == f"Sys\n\n{QUESTION}"
    assert prompt("question_only", system=None) == QUESTION
    assert prompt("xml") == prompt("think_answer") == turns
    assert prompt("boxed") == turns
    assert prompt("think_boxed") == turns + "<think>\n"
    assert prompt("working_out") == f"Sys</s>{QUESTION}<start_working_out>"
    assert prompt("alpaca") == f"Sys\n\n### Instruction:\n{QUESTION}\n\n### Response:\n"
    box = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
    step = "Please reason step by step, and put your final answer within \\boxed{}."
    assert prompt("own") == prompt("qwen") == turns
    assert prompt("qwen", system=None) == turns.replace("Sys", step)
    assert prompt("own", system=None).startswith("<|im_start|>user\n" + QUESTION + "<|im_end|>")
    assert prompt("simplerl") == turns.replace(QUESTION, f"{QUESTION}\n{step}")
    assert prompt("prime_sft") == turns.replace(QUESTION, QUESTION + box)
    assert prompt("prime") == f"Sys User: {QUESTION}{box}. Assistant:"
    assert prompt("prime_code").startswith(f"Sys User: {QUESTION}\n\nWrite Python code")
    assert prompt("prime_code").endswith("```\nat the end.. Assistant:")
    assert prompt("no", system=None) == QUESTION


def test_default_instructions_name_what_parsing_needs() -> None:
    assert make_format("xml").messages(PROBLEM)[0]["content"] == (
        "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
    )
    needed = {
        "r1_zero": ["<think>", "</think>", "<answer>", "</answer>"],
        "boxed": ["step by step", "\\boxed{}"],
        "think_boxed": ["<think>\n {thoughts} </think>\n", "\\boxed{}", "Thought", "Solution"],
        "working_out": ["<start_working_out>", "<end_working_out>", "<SOLUTION></SOLUTION>"],
    }
    for name, words in needed.items():
        instruction = make_format(name).messages(PROBLEM)[0]["content"]
        assert all(word in instruction for word in words), name
    assert "\n" not in make_format("r1_zero").own_system
    assert len(make_format("working_out").own_system.splitlines()) == 4


def test_custom_tags_reach_prompt_instruction_and_parsing(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    tags = {"start": "{{'\"", "end": "%}\\", "solution_start": "🙂(", "solution_end": ")\n🙂"}
    fmt = make_format({"name": "working_out", **tags})
    prompt = fmt.prompt(PROBLEM, tokenizers["plain"])
    assert prompt.endswith(QUESTION + tags["start"])
    assert all(tag in fmt.own_system for tag in tags.values())
    assert fmt.parse("a" + tags["end"] + tags["solution_start"] + "4" + tags["solution_end"]).answer == "4"


def test_whose_system_message_counts() -> None:
    def system(problem: Problem, **options: Any) -> str | None:
        first = make_format({"name": "boxed", **options}).messages(problem)[0]
        return first["content"] if first["role"] == "system" else None

    assert system(PROBLEM) == "Please reason step by step, and put your final answer within \\boxed{}."
    assert system(INSTRUCTED) == "Theirs"
    assert system(INSTRUCTED, system="Mine") == "Mine"
    assert system(PROBLEM, system="Mine") == "Mine"
    assert system(INSTRUCTED, system="") is None
    assert system(PROBLEM, system="") is None


@pytest.mark.parametrize("name", ["qwen", "simplerl", "prime", "prime_sft", "prime_code", "no", "question_only"])
@pytest.mark.parametrize("kind", ["plain", "with_template"])
def test_published_prompts_drop_the_system_message_of_a_row(
    name: str, kind: str, tokenizers: dict[str, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    """Rows of LUFFY's files bring one, and its evaluation drops it; also once the template is saved."""
    for number, system in enumerate([None, "Mine", ""]):
        fmt, tokenizer = make_format({"name": name, "system": system}), reloaded(tokenizers[kind], tmp_path / "fresh")
        expected = fmt.prompt(PROBLEM, tokenizer)
        assert fmt.prompt(INSTRUCTED, tokenizer) == expected
        assert ("Mine" in expected) == (system == "Mine")
        fmt.install(tokenizer)
        fmt.install(tokenizer)
        again = reloaded(tokenizer, tmp_path / str(number))
        text = again.apply_chat_template(as_messages(INSTRUCTED), tokenize=False, add_generation_prompt=True)
        assert text == expected == fmt.prompt(INSTRUCTED, again)
        assert "Theirs" in make_format("own").prompt(INSTRUCTED, tokenizers[kind])
        if name == "prime_sft":
            assert "Theirs" in make_format("boxed").prompt(INSTRUCTED, again)


def test_an_empty_system_leaves_no_trace(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    for name, start in {"r1_zero": "User: ", "xml": "<|im_start|>user", "working_out": "What", "alpaca": "###"}.items():
        assert make_format({"name": name, "system": ""}).prompt(INSTRUCTED, tokenizers["plain"]).startswith(start)


@pytest.mark.parametrize("name", FORMATS)
def test_earlier_turns_are_kept(name: str, tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    fmt = make_format(name)
    prompt = fmt.prompt(CONVERSATION, tokenizers["plain"])
    assert prompt.index("One?") < prompt.index("1</s>") < prompt.index("And {another}?")


@pytest.mark.parametrize("name", FORMATS)
def test_bos_stands_in_front_once_and_only_if_wanted(name: str, tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    with_bos = make_format(name).prompt(PROBLEM, tokenizers["with_bos"])
    without = make_format(name).prompt(PROBLEM, tokenizers["plain"])
    assert with_bos == "<s>" + without
    assert make_format({"name": name, "bos": False}).prompt(PROBLEM, tokenizers["with_bos"]) == without


@pytest.mark.parametrize("name", FORMATS)
def test_bos_that_the_tokenizer_does_not_add_is_not_added(
    name: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    without = make_format(name).prompt(PROBLEM, tokenizers["plain"])
    assert make_format(name).prompt(PROBLEM, tokenizers["with_unused_bos"]) == without
    assert make_format({"name": name, "bos": True}).prompt(PROBLEM, tokenizers["with_unused_bos"]) == "<s>" + without


@pytest.mark.parametrize("name", FORMATS)
def test_bos_that_the_template_writes_is_not_doubled(name: str, tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    without = make_format(name).prompt(PROBLEM, tokenizers["plain"])
    front = "" if without.startswith("<|im_start|>") else "<|im_start|>"
    for bos in (None, True):
        spec = {"name": name, "bos": bos}
        assert make_format(spec).prompt(PROBLEM, tokenizers["with_bos_of_turns"]) == front + without


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reloaded_tokenizer_renders_the_same_prompt(
    name: str, kind: str, tokenizers: dict[str, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    for number, system in enumerate([None, NASTY, ""]):
        fmt = make_format({"name": name, "system": system})
        fresh = reloaded(tokenizers[kind], tmp_path / "fresh")
        expected = fmt.prompt(PROBLEM, fresh)
        fmt.install(fresh)
        again = reloaded(fresh, tmp_path / str(number))
        for tokenizer in (fresh, again):
            text = tokenizer.apply_chat_template(as_messages(PROBLEM), tokenize=False, add_generation_prompt=True)
            assert text == expected == fmt.prompt(PROBLEM, tokenizer)
        if system is None:
            text = again.apply_chat_template(as_messages(INSTRUCTED), tokenize=False, add_generation_prompt=True)
            assert text == fmt.prompt(INSTRUCTED, again)
        assert expected.count(NASTY) == (system == NASTY)
        assert QUESTION in expected


@pytest.mark.parametrize("name", FORMATS)
def test_the_template_renders_a_finished_turn_as_it_was_trained(
    name: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    fmt = make_format(name)
    said = fmt.opening + fmt.compose("a", "4")
    text = tokenizers["plain"].apply_chat_template(
        [*as_messages(PROBLEM), {"role": "assistant", "content": said}], chat_template=fmt.chat_template, tokenize=False
    )
    trained = fmt.prompt(PROBLEM, tokenizers["plain"]) + fmt.compose("a", "4") + "</s>"
    assert text.rstrip("\n") == trained


def test_the_tokenizers_own_template_is_used_where_there_is_one() -> None:
    theirs, none = make_tokenizer(bos=True, template=THEIR_TEMPLATE), make_tokenizer()
    fmt = make_format({"name": "xml", "system": "Sys"})
    assert fmt.prompt(PROBLEM, theirs) == f"<s>[system] Sys\n[user] {QUESTION}\n[assistant] "
    assert fmt.prompt(PROBLEM, none).startswith("<|im_start|>system\nSys")
    own = make_format({"name": "xml", "system": "Sys", "template": "own"})
    assert own.prompt(PROBLEM, theirs) == "<s>" + own.prompt(PROBLEM, none)
    with pytest.raises(UserError, match="no chat template; write `template: own`"):
        make_format({"name": "boxed", "template": "tokenizer"}).prompt(PROBLEM, none)


DATED_TEMPLATE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "unknown" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "none" %}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}{%- set ns.last = (messages|length - 1) - loop.index0 %}{%- endif %}
{%- endfor %}
{{- date_string + "|" + system + "|" + ns.last|string }}
{%- for message in messages %}
    {{- "|" + message.content }}
{%- endfor %}
"""


@pytest.mark.parametrize("system", ["Sys", NASTY.strip()])
def test_a_template_that_asks_for_the_date_gives_the_same_prompt_every_day(system: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(bos=True, template=DATED_TEMPLATE)
    fmt = make_format({"name": "boxed", "system": system})
    expected = f"<s>26 Jul 2024|{system}|0|{QUESTION}"
    assert fmt.prompt(PROBLEM, tokenizer) == expected
    fmt.install(tokenizer)
    once = tokenizer.chat_template
    fmt.install(tokenizer)
    assert tokenizer.chat_template == once
    again = reloaded(tokenizer, tmp_path)
    assert again.apply_chat_template(as_messages(PROBLEM), tokenize=False, add_generation_prompt=True) == expected
    assert fmt.prompt(PROBLEM, again) == expected


def test_installing_twice_changes_nothing_and_the_last_format_wins() -> None:
    tokenizer = make_tokenizer(bos=True, template=THEIR_TEMPLATE)
    first, second = make_format({"name": "xml", "system": "First"}), make_format({"name": "boxed", "system": "Second"})
    first.install(tokenizer)
    once = tokenizer.chat_template
    first.install(tokenizer)
    assert tokenizer.chat_template == once
    second.install(tokenizer)
    text = tokenizer.apply_chat_template(as_messages(PROBLEM), tokenize=False, add_generation_prompt=True)
    assert text == f"<s>[system] Second\n[user] {QUESTION}\n[assistant] "


def test_a_template_that_refuses_a_system_message_is_named() -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}hello"
    tokenizer = make_tokenizer(template=template)
    with pytest.raises(UserError, match=f"refuses problem {PROBLEM.id}: no system here; write `template: own`"):
        make_format("boxed").prompt(PROBLEM, tokenizer)
    assert make_format({"name": "boxed", "system": ""}).prompt(PROBLEM, tokenizer) == "hello"


def test_a_problem_without_a_question_is_named(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    empty = Problem((Message("system", "Theirs"),), id="row-7")
    with pytest.raises(UserError, match="problem row-7 asks nothing"):
        make_format("boxed").prompt(empty, tokenizers["plain"])


@pytest.mark.parametrize("text", [NASTY, "", "'", '"', "\\", "}}", "%}", "\x00", "\x7f", "\u2028", "😀\ud7ff"])
def test_quoted_text_has_that_value_in_jinja(text: str) -> None:
    assert render("{{- " + quote(text) + " }}", [], None) == text


def test_every_format_has_a_template(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    for name, kind in FORMATS.items():
        fmt = make_format(name)
        assert isinstance(fmt, kind) and isinstance(fmt, Format)
        assert fmt.chat_template
        assert fmt.prompt(PROBLEM, tokenizers["plain"]).endswith(fmt.opening)


def test_tools_that_a_template_leaves_out_are_refused_whatever_the_messages_say() -> None:
    fmt, tool = make_format("own"), {"type": "function", "function": {"name": "add", "parameters": {}}}
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}" + THEIR_TEMPLATE
    asked = {"role": "user", "content": "please add 1 and 2"}
    call = {"role": "assistant", "content": "I add.", "tool_calls": [{**tool, "id": "call00000"}]}
    assert '"add"' in fmt.written([asked], make_tokenizer(template=shown), tools=[tool])
    for template, turns, tools, what in (
        (THEIR_TEMPLATE, [asked], [tool], "tools"),
        (THEIR_TEMPLATE, [{**asked, "content": "hi"}], [tool], "tools"),
        (THEIR_TEMPLATE, [asked, call], [], "calls"),
        (shown, [asked, call], [tool], "calls"),
    ):
        with pytest.raises(UserError, match=f"chat template leaves out the {what} of a conversation"):
            fmt.written(turns, make_tokenizer(template=template), tools=tools)
