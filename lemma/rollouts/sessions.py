"""What an agent asked and what it was answered, call by call: the turns of its episode, as they were sampled.

A call whose messages go on from an earlier one, with the model's reply as it was given, reads the ids of that one: what
was sampled is never tokenised again. Anything else is a history of its own, and begins a trajectory of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lemma.engines.protocol import Completion, Key, Request, Sampling
from lemma.formats.dialogue import Dialogue
from lemma.rollouts.episode import Turn
from lemma.rollouts.sample_request import turn_of
from lemma.serving.engine_driver import EngineDriver
from lemma.serving.exchange import TellLikeliest, WireChoice
from lemma.serving.plain_host import check_length, limit_of, room_for
from lemma.serving.wire_errors import ApiError
from lemma.serving.wire_requests import WireCall

# What the recipe decides: other values in a call have no effect, so that the learner knows what it learns from.
DECIDED = frozenset({"temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "seed"})


@dataclass(frozen=True, eq=False)
class _Read:
    """What a call reads: all ids, the turn that it goes on from, and what is new, in words."""

    ids: np.ndarray
    parent: _Said | None
    new: str


@dataclass(frozen=True, eq=False)
class _Said:
    """One answer: what was read, what was sampled, and the history with it as the agent knows it."""

    read: _Read
    completion: Completion
    history: tuple[Any, ...]

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.read.ids, self.completion.ids])


class AgentSession:
    """The calls of one agent. Several may be at work at the same time; each answer becomes a turn."""

    def __init__(self, host: SessionHost, key: Key, sample: int, sampling: Sampling):
        self._host, self._key, self._sample, self._sampling = host, key, sample, sampling
        self._lock = threading.Lock()
        self._asked = 0
        self._reading: dict[Key, _Read] = {}
        self._said: list[_Said] = []
        self.is_over = False

    # --- what the server asks -------------------------------------------------------------------------------------

    def requests(self, asked: WireCall) -> list[Request]:
        check_length(asked, self._host.limit)
        with self._lock:
            reads = self._reads(asked)
            if self._asked + len(reads) > self._host.turns:
                raise ApiError(
                    400, f"an episode has {self._host.turns} calls, and this one is behind the last", code="turn_limit"
                )
            self._host.note(asked)
            made = [self._request(asked, read) for read in reads]
            self._reading |= {request.key: read for request, read in zip(made, reads, strict=True)}
            return made

    def heard(self, asked: WireCall, choice: WireChoice) -> None:
        completion = choice.completion
        with self._lock:
            if self.is_over:
                raise ApiError(401, "this session is over", code="session_over")
            read = self._reading[completion.key]
            self._said.append(_Said(read, completion, self._history(asked, choice)))

    # --- one call -------------------------------------------------------------------------------------------------

    def _request(self, asked: WireCall, read: _Read) -> Request:
        room = room_for(read.ids, self._host.limit)
        number, self._asked = self._asked, self._asked + 1
        own = self._sampling
        limit = min(own.max_tokens, asked.max_tokens or own.max_tokens, room)
        sampling = replace(own, max_tokens=limit, min_tokens=min(own.min_tokens, limit), stop=(*own.stop, *asked.stop))
        return Request((*self._key, self._sample, "call", number), read.ids, sampling, asked.n)

    def _reads(self, asked: WireCall) -> list[_Read]:
        if asked.kind == "chat":
            return [self._read_chat(asked)]
        return [self._read_text(prompt) for prompt in asked.prompts]

    def _read_chat(self, asked: WireCall) -> _Read:
        """Behind the longest history that these messages go on from; otherwise the whole conversation anew."""
        wanted = _chat_history(asked.messages, asked.tools)
        dialogue = self._host.dialogue
        for said in sorted(self._said, key=lambda one: -len(one.history)):
            known = said.history
            if known[0] != "chat" or len(wanted) <= len(known) or wanted[: len(known)] != known:
                continue
            new = asked.messages[len(known) - HEAD :]
            bridge = dialogue.after(said.completion.ids, new, asked.tools)
            if bridge is not None:
                return _Read(np.concatenate([said.ids, bridge]), said, _in_words(new))
        return _Read(dialogue.prompt(asked.messages, asked.tools, continues=asked.continues), None, "")

    def _read_text(self, prompt: str | tuple[int, ...]) -> _Read:
        """As for a chat, where the prompt begins with an earlier one and all that was sampled behind it."""
        dialogue = self._host.dialogue
        for said in sorted(self._said, key=lambda one: -len(one.ids)):
            if said.history[0] != "text":
                continue
            known: Any = said.history[1] if isinstance(prompt, str) else tuple(said.ids.tolist())
            if known is not None and len(prompt) > len(known) and prompt[: len(known)] == known:
                rest = prompt[len(known) :]
                new = dialogue.encode(rest) if isinstance(rest, str) else np.asarray(rest, dtype=np.int64)
                return _Read(np.concatenate([said.ids, new]), said, rest if isinstance(rest, str) else "")
        ids = dialogue.begin(prompt) if isinstance(prompt, str) else np.asarray(prompt, dtype=np.int64)
        return _Read(ids, None, "")

    def _history(self, asked: WireCall, choice: WireChoice) -> tuple[Any, ...]:
        """The history with this answer in it, as the agent knows it."""
        if asked.kind == "chat":
            *messages, last = asked.messages
            begun = last["content"] if asked.continues else ""
            reply: dict[str, Any] = {"role": "assistant", "content": begun + choice.content}
            if choice.calls:
                reply["tool_calls"] = choice.calls
            return _chat_history([*messages, *([] if asked.continues else [last]), reply], asked.tools)
        prompt = asked.prompts[choice.index // asked.n]
        if not isinstance(prompt, str):
            return ("text", None)
        return ("text", prompt + self._host.dialogue.decode(choice.completion.ids.tolist()))

    # --- the episode ----------------------------------------------------------------------------------------------

    def turns(self) -> list[Turn]:
        """All answers as turns. Those that continue each other are adjacent, the last answer at the end."""
        chains: list[list[_Said]] = []
        for said in self._said:
            chain = next((chain for chain in chains if chain[-1] is said.read.parent), None)
            if chain is None:
                chains.append([said])
            else:
                chain.append(said)
        chains.sort(key=lambda chain: self._said.index(chain[-1]))
        return [turn for chain in chains for turn in _turns(chain)]

    def close(self) -> None:
        with self._lock:
            self.is_over = True


class SessionHost:
    """Whom the server asks during rollouts: agents by the key of their session, as the call's key or `X-Session-ID`."""

    name = "policy"
    likeliest: TellLikeliest | None = None

    def __init__(self, driver: EngineDriver, dialogue: Dialogue, turns: int, context: int):
        self.driver, self.dialogue = driver, dialogue
        self.turns, self.limit = turns, min(context, limit_of(driver))
        self.overruled: set[str] = set()
        self._sessions: dict[str, AgentSession] = {}

    def open(self, name: str, session: AgentSession) -> None:
        self._sessions[name] = session

    def serves(self, model: str) -> bool:
        """Agents call the model what they like."""
        return True

    def caller(self, key: str, session: str | None) -> AgentSession:
        caller = self._sessions.get(session or "") or self._sessions.get(key)
        if caller is None:
            raise ApiError(401, "this is the key of no session", code="invalid_api_key")
        if caller.is_over:
            raise ApiError(401, "this session is over", code="session_over")
        return caller

    def note(self, asked: WireCall) -> None:
        """Remember what agents ask for that the recipe decides."""
        self.overruled |= DECIDED & asked.given


# How many parts of a chat's history stand in front of its messages.
HEAD = 2


def _chat_history(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """What must be equal where a conversation goes on: the tools, and of each message all that templates look at."""
    return ("chat", _frozen(tools), *(_frozen(message) for message in messages))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((name, _frozen(inner)) for name, inner in value.items()))
    return tuple(_frozen(inner) for inner in value) if isinstance(value, list | tuple) else value


def _in_words(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def _turns(chain: Sequence[_Said]) -> list[Turn]:
    turns = [_turn(said, before) for said, before in zip(chain, [None, *chain[:-1]], strict=True)]
    for turn, after in zip(turns, chain[1:], strict=False):
        turn.heard = after.read.new
    return turns


def _turn(said: _Said, before: _Said | None) -> Turn:
    known = 0 if before is None else len(before.ids)
    return turn_of(said.completion, said.read.ids[known:].astype(np.int32), extends=before is not None)
