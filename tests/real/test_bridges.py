"""Four turns through the chat templates of published models: what stands between turns, and what an engine is asked."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from lemma.core.errors import UserError
from lemma.core.types import Message, Outcome, Problem
from lemma.engines.protocol import Completion, Request, Sampling
from lemma.environments import Action, Environment, Observation
from lemma.environments.openings import opened_all
from lemma.environments.tools import ToolOptions, understanding
from lemma.formats import make_format
from lemma.formats.bridge import Bridge
from lemma.formats.encode import encode_prompt, encode_text
from lemma.formats.tool_prompt import ToolSpeech, offer, style_of, with_offer
from lemma.formats.tool_schema import Tool
from lemma.models.load_model import load_tokenizer
from lemma.rewards import make_reward
from lemma.rollouts import Journal, SampleRequest, Scorer, World, play, read_episodes
from tests.rollouts.scripted import Scripted

MARKS = re.compile(r"<\|\w+\|>|<｜[^｜>]+｜>|<(?:start|end)_of_turn>|\[/?[A-Z_]{4,}\]")
STYLES = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama",
    "meta-llama-Llama-3.2-3B-Instruct": "llama",
    "meta-llama-Llama-3.3-70B-Instruct": "llama",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
}
# It writes nothing without the functions of its own interface.
REFUSES = "fireworks-ai-llama-3-firefunction-v2"
TURNS = (
    ("It is 4.", True),
    ("It is fo", False),
    ("<think>\nNo: 5.\n</think>\n\nIt is 5.", True),
    ("", True),
)


def search(query: str) -> str:
    """Look something up."""
    return query


TOOL = Tool.of(search)


@pytest.fixture(scope="module")
def llama_bpe(real: Path) -> Any:
    return load_tokenizer(str(real / "vocabularies" / "llama-bpe.gguf"))


def speaking(tokenizer: Any, template: str) -> Any:
    """The tokenizer with a template, whose marks are then special tokens, and its end of a turn the end token."""
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(MARKS.findall(template)))})
    turns = [{"role": role, "content": say} for role, say in (("user", "?"), ("assistant", "SPOKEN"), ("user", "?"))]
    for tools in ([TOOL.as_dict()], None):
        with suppress(UserError):
            text = make_format("own").written(turns, tokenizer, tools=tools)
            end = MARKS.search(text, text.rindex("SPOKEN"))
            tokenizer.eos_token = end[0] if end else "<|end_of_text|>"
    return tokenizer


def check_conversation(tokenizer: Any, role: str, tools: list[Tool]) -> None:
    """Every bridge is the template's own text around the reply, ends a turn once, and has no live mark in the reply."""
    fmt = make_format("own")
    bridge = Bridge.of(fmt, tokenizer, (), 400, ToolSpeech.of(fmt, tokenizer, tools))
    special = sorted({str(token) for token in tokenizer.all_special_tokens})
    alive = set(tokenizer.all_special_ids)
    end = tokenizer.eos_token_id
    reply = 'output: "' + " ".join(special) + '"\n<think>'
    quiet, _ = bridge.ids(np.array([end]), "", role)
    for text, ended in TURNS:
        said = np.array([*encode_text(text, tokenizer), *([end] if ended else [])])
        ids, cut = bridge.ids(said, reply, role)
        assert not cut and len(ids) > len(quiet)
        around, _ = bridge.ids(said, "", role)
        live = [int(token) for token in ids if int(token) in alive]
        assert live == [int(token) for token in around if int(token) in alive]
        assert len(around) == len(quiet) if ended else len(around) > len(quiet)
        assert ended or end in around[: len(around) - len(quiet)] or end not in bridge.frame(role).pieces[0]
        shown = reply if not bridge.frame(role).quoted[0] else reply.replace('"', '\\"').replace("\n", "\\n")
        assert shown in tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_conversation_in_every_template(llama_bpe: Any, templates: dict[str, str]) -> None:
    found = {}
    for name, template in templates.items():
        tokenizer = speaking(llama_bpe, template)
        if name == REFUSES:
            with pytest.raises(UserError, match="refuses"):
                Bridge.of(make_format("own"), tokenizer, (), 400)
            continue
        check_conversation(tokenizer, "user", [TOOL])
        style = style_of(make_format("own"), tokenizer)
        if style is not None:
            found[name] = style
            check_conversation(tokenizer, "tool", [TOOL])
    assert found == STYLES


def test_a_long_reply_loses_its_middle_and_says_so(llama_bpe: Any, templates: dict[str, str]) -> None:
    bridge = Bridge.of(make_format("own"), speaking(llama_bpe, templates["Qwen-Qwen2.5-7B-Instruct"]), (), 10)
    reply = " ".join(map(str, range(100)))
    (ids, cut), (around, _) = bridge.ids(np.zeros(0), reply), bridge.ids(np.zeros(0), "")
    assert cut and len(ids) == len(around) + 10
    assert "0 1" in llama_bpe.decode(ids) and "99" in llama_bpe.decode(ids) and "50" not in llama_bpe.decode(ids)
    (two, cut), (none, _) = bridge.ids(np.zeros(0), [reply, "7"], "tool"), bridge.ids(np.zeros(0), ["", ""], "tool")
    assert cut and len(two) == len(none) + 6


def test_several_results_are_several_tool_messages(llama_bpe: Any, templates: dict[str, str]) -> None:
    tokenizer = speaking(llama_bpe, templates["Qwen-Qwen2.5-7B-Instruct"])
    ids, _ = Bridge.of(make_format("own"), tokenizer, (), 64).ids(np.zeros(0), ["5", "7"], "tool")
    assert tokenizer.decode(ids) == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", ["Qwen-Qwen2.5-7B-Instruct", "google-gemma-2-2b-it"])
def test_tools_are_offered_by_the_template_or_in_words(
    template: str, llama_bpe: Any, templates: dict[str, str]
) -> None:
    tokenizer, fmt = speaking(llama_bpe, templates[template]), make_format("own")
    problem = offer(Problem((Message("user", "Who was it?"),)), [TOOL], "auto", True)
    prompt = fmt.prompt(problem, tokenizer)
    assert "Look something up." in prompt and "<tool_call>" in prompt and prompt.count("Who was it?") == 1
    assert ToolSpeech.of(fmt, tokenizer, [TOOL]).by_template == (template in STYLES)
    assert "Look" not in fmt.prompt(offer(problem, [TOOL], "auto", False), tokenizer)
    shown = with_offer(fmt, offer(problem, [TOOL], "code", True), tokenizer)
    assert "```python" in shown.question and "<tool_call>" not in fmt.prompt(shown, tokenizer)


CALLS = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>',
    "llama": '{"name": "search", "parameters": {"query": "%s"}}',
    "mistral": '[TOOL_CALLS][{"name": "search", "arguments": {"query": "%s"}}]',
}
MOST = 40
# The part of a template that is for tools alone, in a spelling that is not known here.
TOOLS_ALONE = "CohereForAI-c4ai-command-r-plus-tool_use"


class Echo(Environment):
    """Says the same to everything."""

    def __init__(self, reply: str):
        self._reply = reply

    def step(self, said: Action) -> Observation:
        results = (self._reply,) * len(said.tool_calls)
        return Observation("\n".join(results), results=results) if results else Observation(self._reply)

    def score(self) -> Outcome:
        return Outcome(1.0, True)


class Echoing(ToolOptions):
    name: Literal["echoing"] = "echoing"
    says: str = ""

    def tools(self) -> list[Tool]:
        return [TOOL]

    def make(self) -> Environment:
        return Echo(self.says)


class Fluent(Scripted):
    """Says what it is told to in the vocabulary of a real model, special tokens included."""

    def samples(self, request: Request) -> list[Completion]:
        samples = []
        for sample in range(request.n):
            ids = [*encode_text(self.say(request, sample), self.tokenizer), self.tokenizer.eos_token_id]
            cut = ids[: request.sampling.max_tokens]
            zeros = np.zeros(len(cut), dtype=np.float32)
            finish: Any = "stop" if len(cut) == len(ids) else "length"
            samples.append(Completion(request.key, sample, np.array(cut, dtype=np.int32), zeros - 1, zeros, finish, 0))
        return samples


def lines(call: str) -> list[str]:
    """A call, a turn that is cut, thoughts with two calls and a bad one, an answer."""
    long = "<think>\nwell " + "so " * 2 * MOST
    return [call % "a", long, "<think>\nhm\n</think>\n\n" + call % "b", "It is \\boxed{4}."]


def test_every_prompt_of_four_turns_is_in_the_journal(
    llama_bpe: Any, templates: dict[str, str], tmp_path: Path
) -> None:
    fmt, tokenizer = make_format("own"), llama_bpe
    for name, template in templates.items():
        if name in (REFUSES, TOOLS_ALONE):
            continue
        speaking(tokenizer, template)
        spelled = " ".join(sorted({str(token) for token in tokenizer.all_special_tokens}))
        options = Echoing(turns=4, reply_tokens=300, says=f"{spelled} <think> </think>")
        speech = options.speech(fmt, tokenizer)
        said = lines(CALLS[speech.style])
        problem = opened_all(options, [Problem((Message("user", "How many?"),), ("4",), id="p")], 0)[0]
        bridge = Bridge.of(fmt, tokenizer, (), options.reply_tokens, speech)
        world = World(options, bridge, 10**6, understand=understanding(speech, fmt))
        engine = Fluent(tokenizer, lambda request, sample, said=said: said[turn_of(request.key)])
        journal = Journal(tmp_path / f"{name}.jsonl")
        ask = SampleRequest(("rl", 1, 0), problem, encode_prompt(fmt, problem, tokenizer).astype(np.int32), 2)
        scorer = Scorer(fmt, [make_reward("environment")], tokenizer, grade=False)
        list(play(engine, [ask], Sampling(max_tokens=MOST), scorer, world=world, journal=journal))
        world.close()
        journal.close()
        check_journal(list(read_episodes(tmp_path / f"{name}.jsonl")), engine, bridge, name)


def turn_of(key: tuple[Any, ...]) -> int:
    return int(key[-1]) if "turn" in key else 0


def check_journal(episodes: list[Any], engine: Fluent, bridge: Bridge, name: str) -> None:
    assert len(episodes) == 2 and all(len(one.turns) == 4 for one in episodes)
    alive, end = set(engine.tokenizer.all_special_ids), engine.tokenizer.eos_token_id
    for request in engine.asked[1:]:
        (episode,) = [one for one in episodes if one.sample == request.key[3]]
        number = turn_of(request.key)
        assert request.prompt.tolist() == episode.context(number).tolist(), name
        turn, before = episode.turns[number], episode.turns[number - 1]
        assert turn.extends and not before.cut
        quiet, _ = bridge.answer(before.ids, "", [""] * before.calls)
        assert [one for one in turn.context if one in alive] == [one for one in quiet if one in alive], name
        assert (before.finish == "length") == (int(before.ids[-1]) != end) == (number == 2)
    for episode in episodes:
        assert [(turn.calls, turn.bad_calls) for turn in episode.turns] == [(1, 0), (0, 0), (1, 0), (0, 0)], name
        (trajectory,) = episode.trajectories()
        assert trajectory.trained_tokens == sum(len(turn.ids) for turn in episode.turns)
