"""OpenEnv environments, through their WebSocket protocol of reset, step and state; one session per episode."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal

from pydantic import Field

from lemma.core.errors import UserError
from lemma.core.random import key
from lemma.core.types import Message, Outcome, Problem
from lemma.environments.environment import ERROR, Action, Environment, EnvironmentOptions, Observation, WorldGone

# Seconds for which a session that has just ended may still count on the server, and between attempts.
PATIENCE, PAUSE = 5.0, 0.1
FULL = "CAPACITY_REACHED"
# Errors of an action, after which the session goes on: the policy reads them.
INVALID = {"VALIDATION_ERROR", "INVALID_JSON"}
OF_THE_ACTION = {*INVALID, "EXECUTION_ERROR"}
AT_ONCE = 64
LARGEST = 64 << 20


class ServerRefuses(Exception):
    """An error frame: its code, its message, and what is wrong with each field."""

    def __init__(self, data: dict[str, Any]):
        fields = [one for one in data.get("errors") or () if isinstance(one, dict)]
        wrong = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in fields]
        super().__init__("; ".join([str(data.get("message")), *wrong]))
        self.code = str(data.get("code"))


class WebSocket:
    """One connection: a message and its answer at a time, each with a deadline. Raises `ConnectionError` if the other
    side is gone or speaks something else, `TimeoutError` if it is late."""

    def __init__(self, url: str, seconds: float):
        """To ws://host:port/path, or wss:// with TLS."""
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self._fault, self._opened = WebSocketException, ExitStack()
        limits: dict[str, Any] = {"open_timeout": seconds, "close_timeout": 1.0, "max_size": LARGEST}
        try:
            opening = connect(url, compression=None, proxy=None, ping_interval=None, **limits)
            self._connection = self._opened.enter_context(opening)
        except WebSocketException as error:
            raise ConnectionError(f"no WebSocket there: {error}") from error

    def ask(self, text: str, seconds: float) -> str:
        """Send a message and wait for the next one, which a server that is full sends unasked, and hangs up."""
        try:
            with suppress(self._fault):
                self._connection.send(text)
            answer = self._connection.recv(timeout=seconds)
        except self._fault as error:
            raise ConnectionError(f"the server ended the connection: {error}") from error
        return answer if isinstance(answer, str) else answer.decode("utf-8", "replace")

    def close(self) -> None:
        self._opened.close()


class OpenEnvSession(Environment):
    """One session on a server."""

    def __init__(self, options: OpenEnv):
        self._options, self._socket = options, None
        self._rewards: list[float] = []
        # To the actions: the code of a refusal, or nothing.
        self._answers: set[str] = set()

    _socket: WebSocket | None

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        data = {"seed": key(seed, "openenv", problem.id) % 2**31, **self._options.reset_data}
        data |= problem.extra.get("reset", {})
        self._rewards, self._answers = [], set()
        try:
            reply = self._connected(data)
        except ServerRefuses as error:
            raise WorldGone(f"the OpenEnv server failed: {error.code}: {error}") from None
        text = self._options.shown(reply.get("observation"))
        return [Message("user", text)] if text else []

    def step(self, said: Action) -> Observation:
        text = said.text if self._options.says == "text" else said.answer or ""
        action = with_field(self._options.action_data, self._options.action, text)
        try:
            reply = self._asked("step", action, self._options.deadlines.step)
        except ServerRefuses as error:
            self._answers.add(error.code)
            if error.code in OF_THE_ACTION:
                return Observation(f"{ERROR}{error}")
            raise WorldGone(f"the OpenEnv server failed: {error.code}: {error}") from None
        self._answers.add("")
        if reply.get("reward") is not None:
            self._rewards.append(float(reply["reward"]))
        return Observation(self._options.shown(reply.get("observation")), bool(reply.get("done")))

    def score(self) -> Outcome:
        if self._answers and self._answers <= INVALID:
            return Outcome(0.0, False, "the OpenEnv server took no action for valid")
        if not self._rewards:
            return Outcome(None, None, "the OpenEnv server gave no reward")
        reward = sum(self._rewards) if self._options.reward == "sum" else self._rewards[-1]
        return Outcome(reward, reward >= self._options.success_reward)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self, data: dict[str, Any]) -> dict[str, Any]:
        """Open a session and return the result of its reset; waits a little if the server is full."""
        now = time.monotonic()
        last, patient_until = now + self._options.deadlines.reset, now + PATIENCE
        while True:
            self.close()
            self._socket = WebSocket(self._options.address, _left(last))
            try:
                return self._asked("reset", data, _left(last))
            except ServerRefuses as error:
                if error.code != FULL:
                    raise
                if time.monotonic() > patient_until:
                    raise UserError(
                        f"the OpenEnv server at {self._options.url} takes no further session: {error}",
                        fix="start it with a larger max_concurrent_envs, or write `episodes` as many as it takes; the "
                        "attempts at one problem (`group_size`) are made at the same time",
                    ) from None
            time.sleep(PAUSE)

    def _asked(self, kind: str, data: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._socket is not None
        try:
            reply = json.loads(self._socket.ask(json.dumps({"type": kind, "data": data}), seconds))
            given, content = reply["type"], reply["data"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WorldGone("the OpenEnv server answered with something else than a frame") from error
        if not isinstance(content, dict):
            raise WorldGone("the OpenEnv server answered with something else than a frame")
        if given == "error":
            raise ServerRefuses(content)
        return content


def with_field(data: dict[str, Any], path: str, value: str) -> dict[str, Any]:
    """The data with this field set; a dot leads into a nested field."""
    name, _, rest = path.partition(".")
    below = data.get(name)
    inner = with_field(below if isinstance(below, dict) else {}, rest, value) if rest else value
    return {**data, name: inner}


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the OpenEnv server did not answer in time")
    return left


class OpenEnv(EnvironmentOptions):
    """An OpenEnv environment, whose server you run yourself."""

    name: Literal["openenv"] = "openenv"
    """An OpenEnv environment."""
    url: str = ""
    """Address of its server, such as http://127.0.0.1:8000 or ws://host:port/ws."""
    action: str = "message"
    """Field of the action that takes the policy's text; `arguments.message` is the field `message` in `arguments`."""
    says: Literal["text", "answer"] = "text"
    """What goes there: the whole text, or the answer that the format finds in it."""
    action_data: dict[str, Any] = Field(default_factory=dict)
    """Other fields of every action."""
    reset_data: dict[str, Any] = Field(default_factory=dict)
    """Fields of the reset call, in addition to a `seed` made from the run and the problem, and to the problem's own
    `reset`."""
    observation: str = ""
    """Field of an observation that the policy reads, nested ones with dots (`result.data`). Default: its only text
    field, or all of it as JSON."""
    reward: Literal["last", "sum"] = "last"
    """Reward of an episode: the last one that the server gave, or the sum of all."""
    success_reward: float = 1.0
    """An episode with at least this reward counts as a success."""
    problems_per_split: int = Field(100, ge=1)
    """Number of tasks, each with its own seed, if the server owns them: `data: {source: environment}`. Each is opened
    once before training begins."""
    workers: int = Field(1, ge=0)
    """Processes that talk to the server."""

    @property
    def address(self) -> str:
        scheme, _, rest = self.url.partition("://")
        if scheme in ("ws", "wss"):
            return self.url
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest.rstrip('/')}/ws"

    @property
    def keeps_time(self) -> bool:
        return True

    @property
    def calls_at_once(self) -> int:
        return self.worker_calls or AT_ONCE

    def shown(self, observation: Any) -> str:
        """What the policy reads of an observation."""
        if not isinstance(observation, dict):
            return "" if observation is None else str(observation)
        if self.observation:
            value: Any = observation
            for name in self.observation.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        known = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
        texts = [value for value in known.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(known, ensure_ascii=False)

    def make(self) -> Environment:
        return OpenEnvSession(self)

    def problems(self, split: str) -> Sequence[Problem]:
        return [
            Problem((), id=f"openenv/{split}/{number}", source="openenv") for number in range(self.problems_per_split)
        ]

    def check(self) -> None:
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UserError(
                f"'{self.url}' is no address of an OpenEnv server", fix="write `url: http://127.0.0.1:8000`"
            )
        try:
            WebSocket(self.address, self.deadlines.reset).close()
        except (OSError, ValueError) as error:  # an address may have an invalid port
            raise UserError(
                f"no OpenEnv server answers at {self.url}: {error}", fix="start it, or correct `url` of the environment"
            ) from None
