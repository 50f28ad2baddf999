"""The environments of one process, a worker's or the trainer's. One order at a time for each environment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lemma.core.async_calls import Caller
from lemma.core.errors import Interruption, UserError
from lemma.core.outside import OutsideCode
from lemma.core.types import Message, Outcome, Problem
from lemma.environments.environment import Action, Environment, EnvironmentOptions, Observation, WorldGone

Call = Literal["reset", "step", "score", "close"]
# The kinds of answers to an order: the result of the call; the replies of actions that were replayed first; the env
# is lost; the environment raised; it returned the wrong type; it cannot be made.
Kind = Literal["given", "replayed", "gone", "error", "wrong", "refused"]
# Characters kept at either end of a reply, for each token that it may have.
CHARACTERS = 64
LONGEST_REASON = 500
# Time limit for closing an environment.
CLOSE_SECONDS = 10.0
# The same after a call that timed out: the answer must arrive before the worker is taken for lost.
LATE_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Opening:
    """A fresh environment, and the turns to replay in it."""

    problem: Problem
    seed: int
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class EnvOrder:
    """One call of the environment with this number; with an `opening`, in a fresh one."""

    env: int
    call: Call
    action: Action | None = None
    opening: Opening | None = None


@dataclass(frozen=True, slots=True)
class EnvAnswer:
    """The answer to an order. `value` is a sequence of messages or replies, a reply, an outcome, or a sentence."""

    env: int
    kind: Kind
    value: Any = None
    seconds: float = 0.0
    """Time that the call took, without the replay."""


class WrongKind(Exception):
    """An environment returned the wrong type; the message says which."""


class EnvServer:
    """The environments of one process, by number."""

    def __init__(self, options: EnvironmentOptions, is_worker: bool = False):
        self._options, self._caller, self._deadlines = options, Caller(), options.deadlines
        self._envs: dict[int, Environment] = {}
        # In a worker only the environment raises; in the trainer these are raised by a signal.
        self._passed: tuple[type[BaseException], ...] = () if is_worker else (KeyboardInterrupt, Interruption)

    def perform(self, order: EnvOrder, say: Callable[[EnvAnswer], None]) -> None:
        """Execute an order and report the result. One that fails is closed and removed."""
        began, is_late = time.monotonic(), False

        def replayed(replies: tuple[Observation, ...]) -> None:
            nonlocal began
            say(EnvAnswer(order.env, "replayed", replies))
            began = time.monotonic()

        try:
            with OutsideCode():
                value = self._performed(order, replayed)
        except WrongKind as wrong:
            answer = EnvAnswer(order.env, "wrong", str(wrong))
        except UserError as error:
            answer = EnvAnswer(order.env, "refused", str(error))
        except (WorldGone, ConnectionError, TimeoutError) as error:
            answer, is_late = EnvAnswer(order.env, "gone", words_of(error)), isinstance(error, TimeoutError)
        except self._passed:
            raise
        except BaseException as error:  # noqa: BLE001 (what an environment raises is not the policy's fault)
            answer = EnvAnswer(order.env, "error", words_of(error))
        else:
            say(EnvAnswer(order.env, "given", value, time.monotonic() - began))
            return
        seconds = time.monotonic() - began
        self._leave(order.env, LATE_CLOSE_SECONDS if is_late else CLOSE_SECONDS)
        say(replace(answer, seconds=seconds))

    def _performed(self, order: EnvOrder, replayed: Callable[[tuple[Observation, ...]], None]) -> Any:
        if order.call == "close":
            self._leave(order.env)
            return None
        if order.opening is not None:
            messages, replies = self._open(order.env, order.opening)
            if order.call == "reset":
                return messages
            replayed(replies)
        env = self._envs[order.env]
        if order.call == "score":
            return outcome_of(self._caller.call(env.score, seconds=self._deadlines.score), env)
        assert order.call == "step" and order.action is not None
        return self._reply(env, order.action)

    def _open(self, number: int, opening: Opening) -> tuple[tuple[Message, ...], tuple[Observation, ...]]:
        self._leave(number)
        env = self._envs[number] = self._options.make()
        given = self._caller.call(env.reset, opening.problem, opening.seed, seconds=self._deadlines.reset)
        messages = messages_of(given, env)
        return messages, tuple(self._reply(env, action) for action in opening.actions)

    def _reply(self, env: Environment, action: Action) -> Observation:
        given = self._caller.call(env.step, action, seconds=self._deadlines.step)
        return reply_of(given, env, CHARACTERS * self._options.reply_tokens)

    def _leave(self, number: int, seconds: float = CLOSE_SECONDS) -> None:
        """Close an environment, if it exists; errors are ignored."""
        env = self._envs.pop(number, None)
        if env is not None:
            try:
                with OutsideCode():
                    self._caller.call(env.close, seconds=seconds)
            except self._passed:
                raise
            except BaseException:  # noqa: BLE001
                pass

    def close(self) -> None:
        for number in list(self._envs):
            self._leave(number)
        self._caller.close()


def messages_of(given: Any, env: Environment) -> tuple[Message, ...]:
    """The result of `reset`, as messages."""
    if given is None:
        return ()
    if not isinstance(given, Sequence) or not all(isinstance(one, Message) for one in given):
        raise WrongKind(_wrong(env, given, "a list of Message"))
    return tuple(Message(one.role, readable(one.content), one.more) for one in given)


def reply_of(given: Any, env: Environment, half: int) -> Observation:
    """The result of `step`, with valid text that is not much longer than the policy can read."""
    if not isinstance(given, Observation):
        raise WrongKind(_wrong(env, given, "Observation"))
    if not isinstance(given.text, str):
        raise WrongKind(_wrong(env, given.text, "the text of an Observation"))
    if not isinstance(given.results, list | tuple):
        raise WrongKind(_wrong(env, given.results, "a list of results in an Observation"))
    results = tuple(readable(_ends(str(one), half)) for one in given.results)
    prompt = None if given.prompt is None else readable(str(given.prompt))
    return Observation(readable(_ends(given.text, half)), bool(given.done), _number(given.reward, env), prompt, results)


def outcome_of(given: Any, env: Environment) -> Outcome:
    """The result of `score`. A reward that is not finite is an error."""
    if not isinstance(given, Outcome):
        raise WrongKind(_wrong(env, given, "Outcome"))
    success = None if given.success is None else bool(given.success)
    return Outcome(_number(given.reward, env), success, readable(str(given.reason)))


def _number(given: Any, env: Environment) -> float | None:
    if given is None:
        return None
    try:
        number = float(given)
    except (TypeError, ValueError):
        raise WrongKind(_wrong(env, given, "a number as the reward")) from None
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number


def _ends(text: str, half: int) -> str:
    return text if len(text) <= 2 * half else text[:half] + text[len(text) - half :]


def readable(text: str) -> str:
    """The text without lone surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _wrong(env: Environment, given: Any, wanted: str) -> str:
    return f"the environment {type(env).__name__} gave {type(given).__name__} where {wanted} is wanted"


def words_of(error: BaseException) -> str:
    return readable(f"{type(error).__name__}: {error}")[:LONGEST_REASON]


def order_from(row: Mapping[str, Any]) -> EnvOrder:
    action, opening = row["action"], row["opening"]
    if opening is not None:
        turns = tuple(map(_action, opening["actions"]))
        opening = Opening(problem_from(opening["problem"]), opening["seed"], turns)
    return EnvOrder(row["env"], row["call"], None if action is None else _action(action), opening)


def answer_from(row: Mapping[str, Any]) -> EnvAnswer:
    value = row["value"]
    if isinstance(value, list):
        value = tuple(_reply(one) if row["kind"] == "replayed" else Message(**one) for one in value)
    elif isinstance(value, dict):
        value = _reply(value) if "text" in value else Outcome(**value)
    return EnvAnswer(row["env"], row["kind"], value, row["seconds"])


def problem_from(row: Mapping[str, Any]) -> Problem:
    messages = tuple(Message(**one) for one in row["messages"])
    tuples = {name: tuple(row[name]) for name in ("golds", "choices", "traces")}
    return Problem(**{**row, **tuples, "messages": messages})


def _reply(row: Mapping[str, Any]) -> Observation:
    return Observation(**{**row, "results": tuple(row["results"])})


def _action(row: Mapping[str, Any]) -> Action:
    return Action(**{**row, "tool_calls": tuple(row["tool_calls"])})
