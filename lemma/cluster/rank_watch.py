"""Who is alive and where: every rank beats in a store, and a wait that fails or takes too long names who is missing."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.terminal import visible

# Exit code of a rank that lost another one: the whole group may be started again.
LOST = 75
BEAT_SECONDS = 1.0
# How long after a failure of another rank this one may take to notice by itself.
NOTICE_SECONDS = 5.0
FAILED = "failed"


class RankLost(Exception):
    """Another rank is gone or does not come; one sentence that names it, its host and its place."""


class RankWatch:
    """Tells the others where this rank is, and looks for those of whom nothing was heard for `patience` seconds."""

    def __init__(self, store: Any, rank: int, size: int, patience: float):
        self._store, self.rank, self.size, self.patience = store, rank, size, patience
        self._host = socket.gethostname()
        self._place = "the start"
        self._count = 0
        self._ending = threading.Event()
        # Of each rank: what its last beat said, and when that changed.
        self._heard: dict[int, tuple[str, float]] = {}
        # When the store last answered: it may never again, and never say so, where a network is cut.
        self._answered = time.monotonic()

    def start(self) -> None:
        self._beat()
        for work in (self._work, self._guard):
            threading.Thread(target=work, name="watch", daemon=True).start()

    def stop(self) -> None:
        """From now on a store that is gone is nobody's fault."""
        self._ending.set()

    def note(self, place: str) -> None:
        self._place = place

    def tell_failure(self, sentence: str) -> None:
        """Leave a word for the others about why this rank ends."""
        with suppress(RuntimeError):
            self._store.set(FAILED, sentence)

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Within `with`, this rank waits for others; a wait that fails says for whom."""
        before, self._place = self._place, f"waiting for the others: {place}"
        try:
            yield
        except RuntimeError as error:
            raise self._explained(place, error) from error
        finally:
            self._place = before

    # --- beats -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self.rank}", f"{self._count}|{self._host}|{self._place}")

    def _listen(self) -> None:
        """Ask once for all ranks that have ever beaten: a question for each would be too many for the store of 200."""
        names = {other: f"beat/{other}" for other in range(self.size)}
        there = [other for other, name in names.items() if other in self._heard or self._store.check([name])]
        now = time.monotonic()
        for other, beat in zip(there, self._store.multi_get([names[other] for other in there]), strict=True):
            said = beat.decode()
            if other not in self._heard or self._heard[other][0] != said:
                self._heard[other] = (said, now)

    def _work(self) -> None:
        trouble: float | None = None
        while not self._ending.wait(min(BEAT_SECONDS, self.patience / 10)):
            try:
                self._beat()
                self._listen()
                trouble, self._answered = None, time.monotonic()
                if self._store.check([FAILED]):
                    self._leave_after(self._store.get(FAILED).decode())
            except RuntimeError:
                trouble = trouble or time.monotonic()
                if time.monotonic() - trouble > NOTICE_SECONDS and not self._ending.is_set():
                    self._end(f"the store of the ranks on rank 0 does not answer; {self._say_of(0)}", LOST)
            silent = [r for r, (_, since) in self._heard.items() if time.monotonic() - since > self.patience]
            if silent and not self._ending.is_set():
                self._end(f"nothing was heard of {self._say_of(silent[0])} for {self.patience:.0f} s", LOST)

    def _guard(self) -> None:
        """End this rank where the other thread waits for an answer of the store that does not come."""
        while not self._ending.wait(min(BEAT_SECONDS, self.patience / 10)):
            seconds = time.monotonic() - self._answered
            if seconds > self.patience + NOTICE_SECONDS:
                self._end(f"the store of the ranks has not answered for {seconds:.0f} s; {self._say_of(0)}", LOST)

    def _leave_after(self, sentence: str) -> None:
        """Another rank has failed: this one ends too, unless it notices by itself."""
        if not self._ending.wait(NOTICE_SECONDS):
            self._end(sentence, 2)

    def _end(self, sentence: str, code: int) -> None:
        """The main thread may be waiting for ever; what is on disk survives this."""
        say_loss(sentence, self.rank, is_error=code == 2)
        os._exit(code)

    # --- explaining --------------------------------------------------------------------------------------------

    def _explained(self, place: str, error: RuntimeError) -> Exception:
        """Who is missing, or what another rank failed with."""
        if os.strerror(errno.EMFILE) in str(error):  # of this rank, for whom nobody else is missing
            return UserError(f"rank {self.rank} has too many open files", fix="raise the limit with `ulimit -n`")
        reason = reason_of(error)
        try:
            failed = self._failure()
            if failed is not None:
                return UserError(failed)
            missing = self._missing()
        except RuntimeError:
            missing = [0]
        who = " and ".join(self._say_of(other) for other in missing) or "another rank"
        return RankLost(f"rank {self.rank} waited at '{place}', and {who} did not come ({reason})")

    def _failure(self) -> str | None:
        for _ in range(5):
            if self._store.check([FAILED]):
                return str(self._store.get(FAILED).decode())
            time.sleep(0.1)
        return None

    def _missing(self) -> list[int]:
        """Ranks whose beat stands still, or else those that are somewhere else."""
        self._listen()
        before = dict(self._heard)
        time.sleep(2.5 * min(BEAT_SECONDS, self.patience / 10))
        self._listen()
        others = [other for other in range(self.size) if other != self.rank]
        still = [other for other in others if self._heard.get(other) == before.get(other)]
        places = {other: self._place_of(other) for other in others}
        elsewhere = [other for other, place in places.items() if place != self._place]
        return still or elsewhere

    def _place_of(self, other: int) -> str:
        return self._heard.get(other, ("0|an unknown host|the start", 0.0))[0].split("|", 2)[2]

    def _say_of(self, other: int) -> str:
        host = self._heard.get(other, ("0|an unknown host|", 0.0))[0].split("|", 2)[1]
        return f"rank {other} on {host}, last seen at '{self._place_of(other)}'"


def reason_of(error: RuntimeError) -> str:
    """The first sentence of an error, without the place in gloo's sources that stands before it."""
    first = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", str(error).partition("\n")[0])
    return first.partition(". ")[0][:200] or type(error).__name__


def say_loss(sentence: str, rank: int, *, is_error: bool = False) -> None:
    """Tell the launcher, who speaks for all; without one, the terminal."""
    meeting = os.environ.get("LEMMA_MEETING")
    if meeting:
        with suppress(OSError):
            (Path(meeting) / f"said-{rank}").write_text(sentence)
    elif not is_error or os.environ.get("LOCAL_RANK", "0") == "0":  # one of each machine speaks
        with suppress(OSError):
            os.write(2, f"lemma: {'error: ' if is_error else ''}{visible(sentence)}\n".encode())
    sys.stdout.flush()
