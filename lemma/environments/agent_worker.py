"""A process that runs agents."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from lemma.children.child_main import Channel
from lemma.config.registry import file_of, load_place
from lemma.core.errors import UserError
from lemma.core.types import Outcome, Problem
from lemma.environments.env_server import problem_from, words_of


class WrongReward(Exception):
    """An agent returned something that is not a reward."""


class Agents:
    """The agents of this process."""

    def __init__(self, settings: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]):
        self._say, self._command, self._options = say, settings["command"], settings["options"]
        for place in (settings["agent"], settings["score"]):
            if place is not None:
                sys.path.insert(0, str(file_of(place).resolve().parent))
        self._agent = None if settings["agent"] is None else load_place(settings["agent"])
        self._score = None if settings["score"] is None else load_place(settings["score"])
        self._threads = ThreadPoolExecutor(settings["at_once"])
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def order(self, row: Mapping[str, Any]) -> None:
        """Start an agent, or stop one."""
        if "stop" in row:
            task = self._tasks.get(row["stop"])
            if task is not None:
                task.cancel()
        else:
            self._tasks[row["id"]] = asyncio.get_running_loop().create_task(self._play(row))

    async def _play(self, row: Mapping[str, Any]) -> None:
        try:
            problem = problem_from(row["problem"])
            if self._agent is None:
                given: Any = await self._run_command(row)
            else:
                given = await self._call_agent(self._agent, problem, row)
            if self._score is not None:
                given = await self._called(self._score, problem, given)
            elif self._agent is None:
                given = _last_line(given)
            outcome = outcome_of(given)
            self._say({"id": row["id"], "outcome": [outcome.reward, outcome.success, outcome.reason]})
        except WrongReward as error:
            self._say({"id": row["id"], "wrong": str(error)})
        except BaseException as error:  # noqa: BLE001  (an agent may raise what it likes, SystemExit included)
            self._say({"id": row["id"], "failed": _reason(error)})
        finally:
            self._tasks.pop(row["id"], None)

    async def _call_agent(self, agent: Callable[..., Any], problem: Problem, row: Mapping[str, Any]) -> Any:
        more = dict(self._options)
        if "seed" in inspect.signature(agent).parameters:
            more.setdefault("seed", row["seed"])
        return await self._called(agent, problem, row["base_url"], row["api_key"], **more)

    async def _called(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """The result of a function: `async` ones run in the event loop, others in a thread."""
        if inspect.iscoroutinefunction(function):
            return await _guarded(function(*arguments, **more))
        loop = asyncio.get_running_loop()
        given, error = await loop.run_in_executor(self._threads, _caught, function, arguments, more)
        if error is not None:
            raise AgentRaised(_reason(error))
        return await _guarded(given) if inspect.isawaitable(given) else given

    async def _run_command(self, row: Mapping[str, Any]) -> str:
        """The output of the command; its whole process group is killed afterwards."""
        told = {"OPENAI_BASE_URL": row["base_url"], "OPENAI_API_KEY": row["api_key"], "LEMMA_SEED": str(row["seed"])}
        process = await asyncio.create_subprocess_shell(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **told},
            process_group=0,
        )
        try:
            out, _ = await process.communicate(json.dumps(row["problem"]).encode())
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise AgentRaised(f"the command ended with {process.returncode}")
        return out.decode(errors="replace")


class AgentRaised(Exception):
    """What an agent raised, as text: a SystemExit or KeyboardInterrupt must not end the event loop."""


async def _guarded(given: Awaitable[Any]) -> Any:
    try:
        return await given
    except (SystemExit, KeyboardInterrupt) as error:
        raise AgentRaised(_reason(error)) from None


def _caught(function: Callable[..., Any], arguments: Any, more: Any) -> tuple[Any, BaseException | None]:
    try:
        return function(*arguments, **more), None
    except BaseException as error:  # noqa: BLE001
        return None, error


def _reason(error: BaseException) -> str:
    if isinstance(error, AgentRaised):
        return str(error)
    return words_of(error)


def _last_line(printed: str) -> Any:
    lines = printed.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


def outcome_of(given: Any) -> Outcome:
    """From a reward, a mapping with `reward` and `success`, an Outcome, or None for unknown. A reward of at least 1 is
    a success, unless the agent says otherwise."""
    if isinstance(given, Outcome):
        reward, success, reason = given.reward, given.success, given.reason
    elif isinstance(given, Mapping):
        reward, success, reason = given.get("reward"), given.get("success"), str(given.get("reason", ""))
    else:
        reward, success, reason = given, None, ""
    if reward is None and success is not None:
        reward = bool(success)
    if reward is None:
        return Outcome(None, None, reason or "the agent gave no reward")
    if hasattr(reward, "item"):
        reward = reward.item()
    if not isinstance(reward, int | float):
        raise WrongReward(f"the agent gave {type(reward).__name__} where a reward is wanted")
    if not math.isfinite(reward):
        return Outcome(None, None, f"the agent gave {reward} as a reward")
    return Outcome(float(reward), reward >= 1 if success is None else bool(success), reason)


def serve(channel: Channel) -> None:
    """Run agents until the trainer is gone. Their output goes to its log of them."""

    async def work() -> None:
        try:
            agents = Agents(channel.receive(), channel.send)
        except UserError as error:
            channel.send({"fatal": str(error)})
            return
        channel.send({"ready": os.getpid()})
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def listen() -> None:
            while (order := channel.receive()) is not None:
                loop.call_soon_threadsafe(agents.order, order)
            loop.call_soon_threadsafe(over.set)

        threading.Thread(target=listen, daemon=True).start()
        await over.wait()

    asyncio.run(work())
