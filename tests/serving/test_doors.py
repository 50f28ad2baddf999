"""Tools, and sessions of agents, on a server in this process; the model's weights make it call a tool each time."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from lemma.core.types import Message, Problem
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Sampling
from lemma.engines.stop_strings import ends_of
from lemma.engines.transformers_engine import TransformersEngine
from lemma.formats import make_format
from lemma.formats.dialogue import Dialogue
from lemma.models.load_model import load_policy
from lemma.rollouts.sessions import AgentSession, SessionHost
from lemma.serving.engine_driver import EngineDriver
from lemma.serving.exchange import Host
from lemma.serving.http_server import HttpServer
from lemma.serving.openai_app import openai_app
from lemma.serving.plain_host import PlainHost
from tests.serving.parrot import SPECIAL, TOOLS, write_parrot

ASKED: dict[str, Any] = {"model": "parrot", "messages": [{"role": "user", "content": "how many ?"}], "tools": TOOLS}


class Place:
    """A driver at work in a thread, and doors to it."""

    def __init__(self, folder: Path, slow: bool = False) -> None:
        self.policy = load_policy(str(folder), "cpu")
        native = NativeEngine(self.policy, 0, cache_tokens=4096, max_sequences=16)
        self.driver = EngineDriver(TransformersEngine(self.policy, 0) if slow else native)
        self.dialogue = Dialogue(make_format("own"), self.policy.tokenizer, ends_of(self.policy))
        self._is_over = False
        self._doors: list[HttpServer] = []
        self._thread = threading.Thread(target=self.driver.run, args=(lambda: self._is_over,))
        self._thread.start()

    def open(self, host: Host) -> str:
        self._doors.append(HttpServer(openai_app(host)).start())
        return self._doors[-1].url

    def close(self) -> None:
        self._is_over = True
        self._thread.join(30)
        for door in self._doors:
            door.close()


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parrot(tmp_path_factory.mktemp("parrot"))


@pytest.fixture(scope="module")
def place(parrot: Path) -> Iterator[Place]:
    place = Place(parrot)
    yield place
    place.close()


def client(url: str, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


def test_tools_are_shown_and_their_calls_are_read(place: Place) -> None:
    speaker = client(place.open(PlainHost(place.driver, place.dialogue, ["parrot"])))
    extra = {"return_token_ids": True}
    choice = speaker.chat.completions.create(**ASKED, extra_body=extra).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    shown = place.dialogue.decode((choice.model_extra or {})["prompt_token_ids"])
    assert shown.startswith("Question:")
    with pytest.raises(openai.BadRequestError, match="not offered here"):
        speaker.chat.completions.create(**ASKED, logprobs=True, top_logprobs=1)
    pieces = list(speaker.chat.completions.create(**ASKED, stream=True))
    (told,) = [one for piece in pieces for one in piece.choices[0].delta.tool_calls or []]
    assert (told.index, told.function.arguments) == (0, '{"a": 1}')  # type: ignore[union-attr]
    assert pieces[-1].choices[0].finish_reason == "tool_calls"
    plain = speaker.chat.completions.create(**{**ASKED, "tool_choice": "none"}).choices[0]
    assert plain.finish_reason == "stop" and "<tool_call>" in (plain.message.content or "")


def session(place: Place, **limits: Any) -> tuple[AgentSession, SessionHost, openai.OpenAI]:
    host = SessionHost(place.driver, place.dialogue, limits.get("turns", 8), limits.get("context", 256))
    own = AgentSession(host, ("rl", 1, 0), 3, Sampling(8, stop_ids=tuple(sorted(place.dialogue.ends))))
    host.open("its-key", own)
    return own, host, client(place.open(host), "its-key")


def test_a_conversation_with_tools_is_one_trajectory(place: Place) -> None:
    own, _, speaker = session(place)
    messages: list[Any] = list(ASKED["messages"])
    for _ in range(3):
        reply = speaker.chat.completions.create(**{**ASKED, "messages": messages}).choices[0].message
        assert reply.tool_calls
        answer = {"role": "tool", "content": f"7 {SPECIAL} pens", "tool_call_id": reply.tool_calls[0].id}
        messages += [reply.model_dump(), answer]
    first, second, third = own.turns()
    assert [turn.extends for turn in (first, second, third)] == [False, True, True]
    eos = place.policy.tokenizer.eos_token_id
    assert [turn.ids[-1] for turn in (first, second, third)] == [eos] * 3
    # What the tool said is between two turns, and the special token in it is none.
    assert place.dialogue.decode(second.context.tolist()) == "Answer: 7 <unk> pens Assistant:"
    assert first.heard == f"7 {SPECIAL} pens" and third.heard == ""


def test_what_is_rewritten_is_read_anew(place: Place) -> None:
    own, _, speaker = session(place)
    asked = {"model": "x", "messages": [{"role": "user", "content": "how many ?"}]}
    reply = speaker.chat.completions.create(**asked).choices[0].message  # type: ignore[call-overload]
    rest: list[Any] = [{"role": "user", "content": "pens"}]
    changed = {"role": "assistant", "content": (reply.content or "") + " 1"}
    for history in ([reply], [changed], [{"role": "user", "content": "how many ?"}]):
        speaker.chat.completions.create(model="x", messages=[*asked["messages"], *history, *rest])  # type: ignore[misc]
    turns = own.turns()
    assert [turn.extends for turn in turns] == [False, True, False, False]
    whole = np.concatenate([turns[0].context, turns[0].ids, turns[1].context])
    written = place.dialogue.prompt([*asked["messages"], reply.model_dump(), *rest])  # type: ignore[list-item]
    assert whole.tolist() == written.tolist(), "here the template writes history as it was"


def test_an_answer_that_was_begun_is_history_as_a_whole(place: Place) -> None:
    own, _, speaker = session(place)
    messages: list[Any] = [{"role": "user", "content": "how many ?"}, {"role": "assistant", "content": "<tool_call>"}]
    reply = speaker.chat.completions.create(model="x", messages=messages).choices[0].message.content
    assert reply and not reply.startswith("<tool_call>")
    messages[-1] = {"role": "assistant", "content": "<tool_call>" + reply}
    speaker.chat.completions.create(model="x", messages=[*messages, {"role": "user", "content": "pens"}])
    first, second = own.turns()
    assert place.dialogue.decode(first.context.tolist()[-2:]) == "Assistant: <tool_call>"
    assert [first.extends, second.extends] == [False, True]
    messages[-1]["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    with pytest.raises(openai.BadRequestError, match="calls tools and cannot be continued"):
        speaker.chat.completions.create(model="x", messages=messages)


def test_prompts_of_ids_and_of_text_go_on_from_their_own_kind(place: Place) -> None:
    own, _, speaker = session(place)
    asked: Any = {"model": "x", "max_tokens": 2, "extra_body": {"return_token_ids": True}}
    first = speaker.completions.create(**asked, prompt=[121, 122, 4]).choices[0]
    said = (first.model_extra or {})["token_ids"]
    speaker.completions.create(**asked, prompt="how many Assistant:" + first.text)
    second = speaker.completions.create(**asked, prompt=[121, 122, 4, *said, 145, 4]).choices[0]
    text = speaker.completions.create(**asked, prompt="pens Assistant:").choices[0].text
    speaker.completions.create(**asked, prompt=f"pens Assistant:{text} Assistant:")
    assert [turn.extends for turn in own.turns()] == [False, False, True, False, True]
    one = own.turns()[2]
    assert (one.context.tolist(), one.ids.tolist()) == ([145, 4], (second.model_extra or {})["token_ids"])


def test_a_session_has_limits_and_an_end(place: Place) -> None:
    own, host, speaker = session(place, turns=2, context=40)
    asked: Any = {"model": "x", "prompt": "how many", "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="prompt has 60 tokens") as caught:
        speaker.completions.create(**{**asked, "prompt": "pens " * 60})
    assert caught.value.code == "context_length_exceeded"
    for _ in range(2):
        speaker.completions.create(**asked)
    with pytest.raises(openai.BadRequestError, match="an episode has 2 calls") as caught:
        speaker.completions.create(**asked)
    assert caught.value.code == "turn_limit"
    with pytest.raises(openai.AuthenticationError, match="no session"):
        speaker.with_options(api_key="guess").completions.create(**asked)
    named = speaker.with_options(api_key="guess", default_headers={"X-Session-ID": "its-key"})
    with pytest.raises(openai.BadRequestError, match="an episode has 2 calls"):
        named.completions.create(**asked)
    own.close()
    with pytest.raises(openai.AuthenticationError, match="this session is over"):
        speaker.completions.create(**asked)
    assert len(own.turns()) == 2 and host.overruled == set()


def test_an_engine_that_computes_step_by_step_serves_as_well(parrot: Path) -> None:
    place = Place(parrot, slow=True)
    try:
        speaker = client(place.open(PlainHost(place.driver, place.dialogue, ["parrot"])))
        asked: Any = {"model": "parrot", "prompt": "how many pens ? Assistant:", "max_tokens": 9, "temperature": 0}
        whole = speaker.completions.create(**asked, logprobs=0).choices[0]
        assert whole.text.startswith("<tool_call>") and whole.finish_reason == "stop"
        assert whole.logprobs is not None and whole.logprobs.token_logprobs == pytest.approx([0.0] * 4, abs=1e-5)
        assert (
            "".join(piece.choices[0].text for piece in speaker.completions.create(**asked, stream=True)) == whole.text
        )
    finally:
        place.close()


def test_the_agent_of_the_page_plays(place: Place) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    code = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def solve" in code)
    names: dict[str, Any] = {}
    exec(code, names)
    own, host, _ = session(place)
    assert names["solve"](Problem((Message("user", "how many pens ?"),), ("7",)), place.open(host), "its-key") == 0.0
    assert [turn.extends for turn in own.turns()] == [False, True, True, True]
