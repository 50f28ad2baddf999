"""A world that breaks where it is told to, as a file that workers load, and what tests ask of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lemma.core.types import Problem
from lemma.environments import Action, EnvironmentOptions
from lemma.environments.env_handle import EnvHandle
from lemma.environments.env_pool import EnvPool

# Source of a function for programs that import os and time.
STRAY = '''
def leave_stray(path):
    """Start a process in a session of its own, without a parent, and write its id to a file."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writer, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    with open(path, "wb") as file:
        file.write(os.read(reader, 100))

'''
WORLD = '''
import os, pathlib, signal, sys, time
from lemma.environments import Environment, Outcome, Observation, WorldGone

class Trouble(Environment):
    """Counts what it hears; words of what is said, and of the problem's gold for reset and score, are faults."""

    def __init__(self, notes):
        self.notes = pathlib.Path(notes)

    def _once(self, name):
        path = self.notes / name
        if path.exists():
            return False
        path.touch()
        return True

    def _fault(self, text):
        if "once" in text and not self._once("fault"):
            return
        if "hang" in text:
            while True:
                time.sleep(0.01)
        if "spin" in text:
            sum(range(10**11))
        if "exit" in text:
            os._exit(3)
        if "kill" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "raise" in text:
            raise ValueError("no such luck")
        if "leave" in text:
            sys.exit("leaving")
        if "abort" in text:
            raise KeyboardInterrupt
        if "daemon" in text:
            leave_stray(self.notes / "daemon")
        if "reads" in text:
            assert sys.stdin.read() == "", "orders are not for the environment"
        if "late" in text:
            time.sleep(0.7)
        if "dies" in text:
            import threading
            threading.Timer(0.1, os._exit, [3]).start()
        if "gone" in text:
            raise WorldGone("the server is away")
        if "child" in text:
            import subprocess
            subprocess.Popen(["sleep", "600"])

    def reset(self, problem, seed):
        self.count, self.gold, self.luck = 0, problem.gold or "", os.getpid()
        if "reset" in self.gold:
            self._fault(self.gold)

    def step(self, said):
        self.count += 1
        print("the policy says", said.text)
        self._fault(said.text)
        if "garbage" in said.text:
            return "not a reply"
        if "nan" in said.text:
            return Observation("x", reward=float("nan"))
        if "accents" in said.text:
            return Observation("\u00e9" * 1000, results=["\u00e9" * 1000] * 100)
        if "odd" in said.text:
            return Observation("half \\ud800 a character")
        if "huge" in said.text:
            return Observation("a" * 30_000_000 + "b")
        return Observation(f"{self.count} {said.text}" + (f" {self.luck}" if "luck" in said.text else "")
                     + (f" {time.time_ns()}" if "chance" in said.text else ""))

    def score(self):
        if "score" in self.gold:
            self._fault(self.gold)
        return Outcome(float(self.count), True)

    def close(self):
        if "close" in self.gold:
            self._fault(self.gold)
        (self.notes / f"closed-{os.getpid()}-{id(self)}").touch()


class Crowd(Trouble):
    """Says how many worlds there are."""

    open = 0

    def reset(self, problem, seed):
        from lemma.core.types import Message

        Crowd.open += 1
        self.gold = ""
        return [Message("user", f"{problem.gold} {Crowd.open}")]

    def close(self):
        Crowd.open -= 1


class Waiting(Trouble):
    async def step(self, said):
        import asyncio
        await asyncio.sleep(600 if "linger" in said.text else 0.2)
        return Trouble.step(self, said)

    async def close(self):
        import asyncio
        await asyncio.sleep(600 if self.gold == "stuck" else 0)
        Trouble.close(self)
'''


def write_world(folder: Path) -> str:
    path = folder / "trouble_world.py"
    path.write_text(WORLD + STRAY)
    return str(path)


class Worlds(EnvPool):
    """A pool whose calls are begun in one line of a test and waited for in another."""

    def __init__(self, options: EnvironmentOptions):
        super().__init__(options)
        self._calls: dict[EnvHandle, asyncio.Future[Any]] = {}
        self._test_loop = asyncio.new_event_loop()

    def begin(self, env: EnvHandle, call: Callable[[], Awaitable[Any]]) -> None:
        async def begun() -> None:
            self._calls[env] = asyncio.ensure_future(call())

        self._test_loop.run_until_complete(begun())

    def opened(self, problem: Problem, seed: int = 0) -> EnvHandle:
        env = self.open(problem, seed)
        self.begin(env, env.reset)
        return env

    def say(self, env: EnvHandle, text: str) -> None:
        self.begin(env, lambda: env.step(Action(text)))

    def score(self, env: EnvHandle) -> None:
        self.begin(env, env.score)

    def wait(self, *envs: EnvHandle) -> list[Any]:
        """What each call gives, a failure as well."""
        until = time.monotonic() + 60
        while not all(self._calls[env].done() for env in envs):
            assert time.monotonic() < until, "no answer"
            self.poll()
            time.sleep(0.005)
        return [call.exception() or call.result() for call in map(self._calls.__getitem__, envs)]


def wait(worlds: Worlds, *envs: EnvHandle) -> list[Any]:
    return worlds.wait(*envs)


def said(worlds: Worlds, env: EnvHandle, text: str) -> Any:
    worlds.say(env, text)
    return worlds.wait(env)[0]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids: list[int]) -> None:
    until = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(alive, pids))


def processes(worlds: Worlds) -> list[int]:
    """Every process below this one that belongs to the workers."""
    found = [worker.child.process.pid for worker in worlds._workers if worker.child is not None]
    for pid in found:
        found += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found
