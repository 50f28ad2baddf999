"""Ranks that are forked from a process that has everything imported, instead of started anew."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lemma.cluster.launching import Launcher
from tests.preloaded import CONTEXT

Program = Callable[[list[str], dict[str, str], Path], None]


def lemma_rank(words: list[str], changes: dict[str, str], output: Path) -> None:
    """A rank that runs `lemma WORDS` and writes all that it prints to a file."""
    import torch

    from lemma.cli import main

    os.setsid()
    os.environ.update(changes)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    code = main(words)
    sys.stdout.flush()
    os._exit(code)


class ForkedRank:
    """What a launcher wants of a process."""

    def __init__(self, words: list[str], env: Mapping[str, str], output: Path, program: Program = lemma_rank):
        # The server may have been started under another fault.
        changes = {name: value for name, value in env.items() if os.environ.get(name) != value or name == "LEMMA_FAULT"}
        changes.pop("LEMMA_LAUNCHER", None)  # the parent of a forked rank is another process
        self._process = CONTEXT.Process(target=program, args=(words, changes, output))
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode or 0

    def send_signal(self, sig: int) -> None:
        os.kill(self.pid, sig)


class Forked(Launcher):
    """`lemma train FOLDER/recipe.yaml --ranks COUNT` with forked ranks; what it says, and what they print."""

    said: list[str]

    def __init__(self, folder: Path, count: int = 2, restarts: int = 3, fault: str = "", program: Program = lemma_rank):
        self.said = []
        words = ["train", str(folder / "recipe.yaml")]
        super().__init__(words, count, folder / "run", restarts=restarts, fresh=False, say=self.said.append)
        self._env = {"LEMMA_FAULT": fault} if fault else {}
        self._output, self._program = folder / "output.txt", program

    def start_rank(self, command: Sequence[str], env: dict[str, str], output: Path | None) -> Any:
        return ForkedRank(list(command), env | self._env, output or self._output, self._program)

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def pid_of(self, rank: int) -> int:
        return self._ranks[rank].pid


# `lemma`, whose launcher forks its ranks: they are children of its own, as those that it starts.
LAUNCHER = """
import multiprocessing, sys
from pathlib import Path
from lemma.cli import main
from lemma.cluster.launching import Launcher
from tests.cluster.forked import lemma_rank

def start_rank(self, command, env, output):
    rank = multiprocessing.get_context("fork").Process(
        target=lemma_rank, args=(command[3:], env, output or Path("/dev/stderr"))
    )
    rank.start()
    rank.poll = lambda: rank.exitcode
    return rank

Launcher.start_rank = start_rank
sys.exit(main())
"""


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.01)
