"""Starting the ranks of one machine, ending them together, and starting them again when one of them dies.

Each rank is a process that runs the same command. What is on disk survives any of their deaths, so that the group goes
on from its last checkpoint and its journals.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Protocol

from lemma.cluster.rank_end import INTERRUPTED
from lemma.cluster.rank_watch import LOST
from lemma.core.errors import UserError
from lemma.core.rank_objects import KEY_VARIABLE
from lemma.core.terminal import visible

# How long ranks may take to end once one of them ended in good order, and once one of them failed.
LAST_SECONDS, FAILED_SECONDS = 120.0, 10.0
SHOWN_LINES = 30
# How much of what a rank has printed is looked at.
SHOWN_BYTES = 2**16
USER_ERROR = 2
# Where a run folder keeps what a fresh start will throw away.
ASIDE = ".earlier"


class RankProcess(Protocol):
    """A process that was started, as the launcher sees it."""

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...


@dataclass(frozen=True)
class RankFailure:
    """Why the ranks did not end well."""

    rank: int
    code: int
    sentence: str


class FreshStart:
    """`--fresh`, for the ranks that a launcher starts again and again: given until a stage has begun anew. From then on
    there is new work in the run folder, which must not be thrown away."""

    def __init__(self, folder: Path, is_wanted: bool):
        self._folder, self._is_wanted = folder, is_wanted
        self._before = _beginnings(folder)

    @property
    def words(self) -> list[str]:
        """What the next attempt is told."""
        return ["--fresh"] if self._is_wanted and not self._has_begun() else []

    def progress_since(self, before: tuple[int, int]) -> tuple[int, int]:
        """How far the run was before: steps that were thrown away do not count."""
        if not self._is_wanted or not self._has_begun():
            return before
        self._is_wanted = False
        return 0, 0

    def _has_begun(self) -> bool:
        """What the earlier run left is kept aside until then."""
        return not (self._folder / ASIDE).exists() and not _beginnings(self._folder) <= self._before


def _beginnings(folder: Path) -> set[tuple[int, int]]:
    """The record of a run and the folders of its stages: each is another one after a fresh start of its own."""
    found = set()
    for path in (folder / "run.json", *folder.glob("stages/*")):
        with suppress(OSError):
            there = path.stat()
            found.add((there.st_ino, 0 if path.is_dir() else there.st_mtime_ns))
    return found


def is_begun_already(folder: Path) -> bool:
    """Whether a stage has begun in this run folder since torchrun was started, which repeats a command as it is, with
    `--fresh` too."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or (folder / ASIDE).exists():
        return False
    import psutil

    with suppress(OSError, psutil.Error):
        launched = psutil.Process(os.getppid()).create_time()
        return any(path.stat().st_mtime > launched for path in (folder / "run.json", *folder.glob("stages/*")))
    return False


class Launcher:
    """Runs `command` as `count` ranks in `folder`, a run's; `say` speaks to people."""

    poll_seconds: ClassVar[float] = 0.05
    cause_seconds: ClassVar[float] = 0.5
    """How long to look for the first cause, once one rank has died."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        folder: Path,
        *,
        restarts: int,
        fresh: bool,
        say: Callable[[str], None],
    ):
        self._command, self._count, self._folder = command, count, folder
        self._restarts, self._fresh = restarts, FreshStart(folder, fresh)
        self._say: Callable[[str], None] = lambda text: say(visible(text))
        self._ranks: list[RankProcess] = []
        self._stops = 0

    def run(self) -> int:
        """Until all ranks ended; the exit code of the command."""
        in_a_row, before = 0, progress(self._folder)
        with self._forwarding():
            for attempt in range(10**6):
                fall = self._attempt(attempt)
                if fall is None:
                    return 0
                if fall.code in (USER_ERROR, INTERRUPTED) or self._stops:
                    if fall.sentence:
                        self._say(fall.sentence)
                    return fall.code if fall.code > 0 else 1
                before = self._fresh.progress_since(before)
                now = progress(self._folder)
                in_a_row = in_a_row + 1 if now <= before else 1
                before = max(now, before)
                if in_a_row > self._restarts:
                    again = f"; {self._restarts} starts in a row brought no further step" if self._restarts else ""
                    self._say(f"error: {fall.sentence}{again}")
                    break
                self._say(f"{fall.sentence}; starting the {self._count} ranks again ({in_a_row} of {self._restarts})")
        return 1

    # --- one attempt -------------------------------------------------------------------------------------------

    def _attempt(self, attempt: int) -> RankFailure | None:
        meeting = Path(tempfile.mkdtemp(prefix="lemma-ranks-"))
        try:
            self._start(attempt, meeting)
            return self._wait(meeting)
        finally:
            for rank in self._ranks:
                self.end_rank(rank)
            shutil.rmtree(meeting, ignore_errors=True)

    def _start(self, attempt: int, meeting: Path) -> None:
        self._ranks = []
        for rank, env in enumerate(self.environments(attempt, meeting)):
            command = [*self._command, *self._fresh.words]
            try:
                started = self.start_rank(command, env, None if rank == 0 else meeting / f"rank-{rank}.txt")
            except OSError as error:
                raise UserError(
                    f"rank {rank} of {self._count} cannot be started ({error.strerror})",
                    fix="start fewer ranks, or raise the limits on processes and open files (`ulimit -u`, `ulimit -n`)",
                ) from error
            self._ranks.append(started)
        if self._stops:  # somebody asked while there were not all of them
            self._signal(signal.SIGTERM)

    def environments(self, attempt: int, meeting: Path) -> list[dict[str, str]]:
        """The variables of each rank."""
        threads = max(1, (os.cpu_count() or 1) // self._count)
        shared = {"OMP_NUM_THREADS": str(threads), **os.environ, KEY_VARIABLE: secrets.token_hex(32)}
        shared |= {"WORLD_SIZE": str(self._count), "LOCAL_WORLD_SIZE": str(self._count)}
        shared |= {"LEMMA_MEETING": str(meeting), "LEMMA_LAUNCHER": str(os.getpid()), "LEMMA_ATTEMPT": str(attempt)}
        return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self._count)]

    def start_rank(self, command: Sequence[str], env: dict[str, str], output: Path | None) -> RankProcess:
        """One rank, in a session of its own: Ctrl-C reaches it through the launcher only."""
        with open(output, "wb") if output is not None else nullcontext() as file:
            return subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def look(self) -> None:
        """Called again and again while ranks are at work."""

    def end_rank(self, rank: Any) -> None:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()

    def _wait(self, meeting: Path) -> RankFailure | None:
        first_end: float | None = None
        while True:
            self.look()
            codes = [rank.poll() for rank in self._ranks]
            if any(code not in (None, 0) for code in codes):
                return self._fall(meeting)
            if all(code == 0 for code in codes):
                return None
            if 0 in codes:
                first_end = first_end or time.monotonic()
                if time.monotonic() - first_end > LAST_SECONDS:
                    late = codes.index(None)
                    return RankFailure(late, 1, f"rank {late} did not end within {LAST_SECONDS:.0f} s after the others")
            time.sleep(self.poll_seconds)

    def _fall(self, meeting: Path) -> RankFailure:
        """The first cause among ranks that ended badly: a mistake of the user, a signal, an error; then lost ones."""
        until = time.monotonic() + self.cause_seconds
        while time.monotonic() < until or self._is_leader_about_to_speak(until):
            if all(rank.poll() is not None for rank in self._ranks):
                break
            time.sleep(self.poll_seconds)
        codes = [rank.poll() for rank in self._ranks]
        bad = {rank: code for rank, code in enumerate(codes) if code not in (None, 0)}
        for wanted in (USER_ERROR, INTERRUPTED):
            if wanted in bad.values():
                rank = next(rank for rank, code in bad.items() if code == wanted)
                told = codes[0] == wanted  # by the first rank, which has the terminal
                return RankFailure(rank, wanted, "" if told else self.last_words(meeting, rank))
        gone = [rank for rank, code in enumerate(codes) if code == 0]
        if gone and set(bad.values()) == {LOST}:
            return RankFailure(
                gone[0], LOST, f"rank {gone[0]} ended with code 0 in the middle of the run, by its own doing"
            )
        signals = {rank: code for rank, code in bad.items() if code is not None and code < 0}
        errors = {rank: code for rank, code in bad.items() if code != LOST}
        rank, code = next(iter((signals or errors or bad).items()))
        assert code is not None
        if code < 0:
            return RankFailure(rank, code, f"{self.name_of(rank)} was killed by {_signal_name(-code)}")
        words = self.last_words(meeting, rank)
        if code != LOST:
            self._show(meeting, rank)
        return RankFailure(rank, code, words or f"{self.name_of(rank)} ended with code {code}")

    def _is_leader_about_to_speak(self, since: float) -> bool:
        """Where another rank found a mistake of the user, the first one, which has the terminal, may say it."""
        found = any(rank.poll() == USER_ERROR for rank in self._ranks)
        return found and self._ranks[0].poll() is None and time.monotonic() - since < FAILED_SECONDS

    def name_of(self, rank: int) -> str:
        return f"rank {rank}"

    def last_words(self, meeting: Path, rank: int) -> str:
        for path in (meeting / f"said-{rank}", meeting / f"rank-{rank}.txt"):
            with suppress(OSError):
                lines = [line.strip() for line in _end_of(path).splitlines() if line.strip()]
                if lines:
                    return lines[-1].removeprefix("lemma: ")
        return ""

    def _show(self, meeting: Path, rank: int) -> None:
        if rank != 0:
            with suppress(OSError):
                lines = _end_of(meeting / f"rank-{rank}.txt").splitlines()[-SHOWN_LINES:]
                sys.stderr.write("".join(f"rank {rank}: {visible(line)}\n" for line in lines))

    # --- signals -----------------------------------------------------------------------------------------------

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C go to all ranks, which agree on the step after which they save and end."""

        def forward(number: int, frame: FrameType | None) -> None:
            self._stops += 1
            self._signal(number)

        before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(number)


def _end_of(file: Path) -> str:
    """The last part of a file, which may be far larger than memory."""
    with open(file, "rb") as handle:
        handle.seek(max(0, handle.seek(0, os.SEEK_END) - SHOWN_BYTES))
        return handle.read().decode(errors="replace")


def _signal_name(number: int) -> str:
    with suppress(ValueError):  # most real-time signals have no name
        return signal.Signals(number).name
    return f"signal {number}"


def progress(folder: Path) -> tuple[int, int]:
    """How far a run is: stages that are done, and the last step with a row of metrics."""
    done = len(list(folder.glob("stages/*/done.json")))
    last = 0
    with suppress(OSError, ValueError, KeyError, IndexError):
        whole = (folder / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
        last = int(json.loads(whole[-1])["step"])
    return done, last
