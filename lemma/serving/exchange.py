"""One API call of a client, from its requests to its choices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from lemma.core.types import content_id
from lemma.engines.protocol import Completion, Key, NewTokens, Request
from lemma.formats.dialogue import Dialogue
from lemma.formats.tool_calls import Style, parse_tool_calls
from lemma.serving.engine_driver import Call, CallEvent, EngineDriver
from lemma.serving.text_stream import TextStream
from lemma.serving.wire_errors import ApiError
from lemma.serving.wire_requests import WireCall

Likeliest = Sequence[Sequence[tuple[int, float]]]
"""For each sampled token, the likeliest ones with their log-probabilities."""
TellLikeliest = Callable[[np.ndarray, np.ndarray, int, float], Likeliest]
"""Those of a prompt and the ids after it: how many, and at which temperature."""

# How many ids of a text that is continued are enough to decode what follows it.
CONTEXT = 8


@dataclass(frozen=True)
class WireChoice:
    """One sample as the client sees it: `content` and tool `calls` of a chat, only `content` of a text completion."""

    index: int
    content: str
    completion: Completion
    prompt: np.ndarray
    calls: list[dict[str, Any]] = field(default_factory=list)
    likeliest: Likeliest = ()

    @property
    def finish(self) -> str:
        return "tool_calls" if self.calls else self.completion.finish


@dataclass(frozen=True)
class NewText:
    """New text of one sample."""

    index: int
    text: str


class WireCaller(Protocol):
    """An authorised client: turns a call into requests, and sees each choice before it is sent.

    If `is_over`, nobody waits for its answers.
    """

    is_over: bool

    def requests(self, asked: WireCall) -> list[Request]: ...
    def heard(self, asked: WireCall, choice: WireChoice) -> None: ...


class Host(Protocol):
    """What a server serves."""

    name: str
    driver: EngineDriver
    dialogue: Dialogue
    likeliest: TellLikeliest | None
    """Called in the driver's thread; None where they are not offered."""

    def caller(self, key: str, session: str | None) -> WireCaller:
        """The caller with this API key or session name; raises ApiError if there is none."""
        ...

    def serves(self, model: str) -> bool: ...


class Exchange:
    """Starts when it is made, and gives what happens to `put`; always `close` it."""

    def __init__(self, host: Host, caller: WireCaller, asked: WireCall, put: Callable[[CallEvent], None]):
        self.asked, self._host, self._caller, self._put = asked, host, caller, put
        if asked.likeliest and host.likeliest is None:
            raise ApiError(400, "the likeliest tokens are not offered here; ask for the log-probabilities of the "
                           "sampled ones alone", param="top_logprobs", code="unsupported_parameter")  # fmt: skip
        # Tool calls are parsed from the whole text, so with tools nothing can be streamed before the end.
        self._streams_text = asked.stream and not asked.tools
        self._hears_tokens = self._streams_text and host.driver.engine.streams_tokens
        self.requests = [replace(one, stream=self._hears_tokens) for one in caller.requests(asked)]
        self._places: dict[Key, int] = {request.key: place for place, request in enumerate(self.requests)}
        self._streams = [self._stream(request) for request in self.requests for _ in range(request.n)]
        self.choices: dict[int, WireChoice] = {}
        self._likeliest: dict[int, Likeliest] = {}
        self._call: Call = host.driver.submit(self.requests, self._put_with_likeliest if asked.likeliest else put)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.completion.ids) for choice in self.choices.values())

    @property
    def is_over(self) -> bool:
        return len(self.choices) == len(self._streams)

    async def follow(self, events: asyncio.Queue[CallEvent | Exception]) -> AsyncIterator[NewText | WireChoice]:
        """New text as it is generated, if the client streams, and each choice when it is complete. Raises what is an
        exception among the events."""
        while not self.is_over:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, NewTokens):
                index = self._index(event.key, event.sample)
                for part in self._part(index, self._streams[index].feed(event.ids.tolist())):
                    yield part
            else:
                for one in self._ended(event):
                    yield one

    def close(self) -> None:
        if not self.is_over:
            self._host.driver.drop(self._call)

    def _put_with_likeliest(self, event: CallEvent) -> None:
        """In the driver's thread, which alone may use the model."""
        if isinstance(event, Completion):
            request, tell = self.requests[self._places[event.key]], self._host.likeliest
            assert tell is not None
            try:
                self._likeliest[self._index(event.key, event.sample)] = tell(
                    request.prompt, event.ids, self.asked.likeliest, request.sampling.temperature
                )
            except ApiError as error:
                event = error
        self._put(event)

    def _index(self, key: Key, sample: int) -> int:
        return self._places[key] * self.asked.n + sample

    def _part(self, index: int, text: str) -> Iterator[NewText]:
        if text and self._streams_text:
            yield NewText(index, text)

    def _ended(self, completion: Completion) -> Iterator[NewText | WireChoice]:
        index = self._index(completion.key, completion.sample)
        stream = self._streams[index]
        new = "" if self._hears_tokens else stream.feed(completion.ids.tolist())
        yield from self._part(index, new + stream.finish(completion.finish))
        content = stream.text
        calls: list[dict[str, Any]] = []
        if self.asked.tools:
            content, calls = read_calls(content, self._host.dialogue.style, completion.key, completion.sample)
        prompt = self.requests[self._places[completion.key]].prompt
        choice = WireChoice(index, content, completion, prompt, calls, self._likeliest.get(index, ()))
        self._caller.heard(self.asked, choice)
        self.choices[index] = choice
        yield choice

    def _stream(self, request: Request) -> TextStream:
        sampling = request.sampling
        keeps = [stop for stop in sampling.stop if stop not in self.asked.stop]
        return TextStream(
            self._host.dialogue.decode,
            self._host.dialogue.ends,
            keeps=keeps,
            cuts=self.asked.stop,
            min_tokens=sampling.min_tokens,
            before=request.prompt[-CONTEXT:].tolist() if self.asked.continues else (),
        )


# The length that the strictest chat templates require.
ID_LENGTH = 9


def read_calls(text: str, style: Style, key: Key, sample: int) -> tuple[str, list[dict[str, Any]]]:
    """The text without the calls, and the calls in the API's format.

    If any call cannot be parsed, the whole text and no calls. The id of a call depends on the request only.
    """
    spoken = parse_tool_calls(text, style)
    if not spoken.calls or any(call.fault for call in spoken.calls):
        return text, []
    calls = [
        {
            "id": content_id(key, sample, number)[:ID_LENGTH],
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for number, call in enumerate(spoken.calls)
    ]
    return spoken.content, calls
