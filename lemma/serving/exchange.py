"""One call of a client from its requests to its choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lemma.engines.protocol import Completion, Key, Request
from lemma.formats.dialogue import Dialogue
from lemma.serving.engine_driver import Call, EngineDriver, Tokens
from lemma.serving.served_tools import read_calls
from lemma.serving.speech import Speech
from lemma.serving.wire_errors import ApiError
from lemma.serving.wire_requests import WireCall

# How often somebody looks whether the client is still there.
LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class WireChoice:
    """One sample as the client reads it: `content` and `calls` of a chat, `content` alone of a completion."""

    index: int
    content: str
    completion: Completion
    prompt: np.ndarray
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def finish(self) -> str:
        return "tool_calls" if self.calls else self.completion.finish


@dataclass(frozen=True)
class NewText:
    """New text of one sample."""

    index: int
    text: str


class WireCaller(Protocol):
    """Whoever may ask: turns a call into requests, and hears what the model said before the client does.

    Nobody waits for the answers of one that `is_over`.
    """

    is_over: bool

    def requests(self, asked: WireCall) -> list[Request]: ...
    def heard(self, asked: WireCall, choice: WireChoice) -> None: ...


class Host(Protocol):
    """Whom a server asks."""

    name: str
    driver: EngineDriver
    dialogue: Dialogue

    def caller(self, key: str, session: str | None) -> WireCaller:
        """Who is speaking, by the key of the call or the name of its session; ApiError for strangers."""
        ...

    def serves(self, model: str) -> bool: ...


class Exchange:
    """Begun when it is made; `close` it, whatever happened."""

    def __init__(self, host: Host, caller: WireCaller, asked: WireCall):
        self.asked, self._host, self._caller = asked, host, caller
        self.requests = caller.requests(asked)
        self._places: dict[Key, int] = {request.key: place for place, request in enumerate(self.requests)}
        # Calls of tools are found in the whole text, so that nothing of it can be told before.
        self._is_told = asked.stream and not asked.tools
        self._speeches = [self._speech(request) for request in self.requests for _ in range(request.n)]
        self.choices: dict[int, WireChoice] = {}
        self._call: Call = host.driver.ask(self.requests, wants_tokens=self._is_told)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.completion.ids) for choice in self.choices.values())

    @property
    def is_over(self) -> bool:
        return len(self.choices) == len(self._speeches)

    def follow(self, is_gone: Callable[[], bool]) -> Iterator[NewText | WireChoice]:
        """Text as it comes, where the client streams, and each choice when it is complete.

        ApiError where the engine refuses or fails; ConnectionError where the client has gone away.
        """
        while not self.is_over:
            news = self._call.next(LOOK_SECONDS)
            if isinstance(news, ApiError):
                raise news
            if self._caller.is_over:
                raise ApiError(401, "this session is over", code="session_over")
            if news is None:
                if is_gone():
                    raise ConnectionError("the client has gone away")
            elif isinstance(news, Tokens):
                index = self._index(news.key, news.sample)
                yield from self._part(index, self._speeches[index].hear(news.ids.tolist()))
            else:
                yield from self._ended(news)

    def close(self) -> None:
        if not self.is_over:
            self._host.driver.drop(self._call)

    def _index(self, key: Key, sample: int) -> int:
        return self._places[key] * self.asked.n + sample

    def _part(self, index: int, text: str) -> Iterator[NewText]:
        if text and self._is_told:
            yield NewText(index, text)

    def _ended(self, completion: Completion) -> Iterator[NewText | WireChoice]:
        index = self._index(completion.key, completion.sample)
        speech = self._speeches[index]
        new = "" if self._call.wants_tokens else speech.hear(completion.ids.tolist())
        yield from self._part(index, new + speech.end(completion.finish))
        content = speech.text
        calls: list[dict[str, Any]] = []
        if self.asked.tools:
            content, calls = read_calls(content, self._host.dialogue.style, completion.key, completion.sample)
        prompt = self.requests[self._places[completion.key]].prompt
        choice = WireChoice(index, content, completion, prompt, calls)
        self._caller.heard(self.asked, choice)
        self.choices[index] = choice
        yield choice

    def _speech(self, request: Request) -> Speech:
        sampling = request.sampling
        keeps = [stop for stop in sampling.stop if stop not in self.asked.stop]
        return Speech(
            self._host.dialogue.decode,
            self._host.dialogue.ends,
            keeps=keeps,
            cuts=self.asked.stop,
            min_tokens=sampling.min_tokens,
        )
