"""Code of the user's own that runs in the process of a run, such as a reward: what it may not leave behind.

It is trusted, and may do what it likes; but it is written for itself, and the run goes on after it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

_trainer: int | None = None
"""The process that trains, within `training`."""
is_fork = False
"""Whether this process was forked from it: then it may not go on."""


class OutsideCode:
    """Within `with`, code of the user's own runs. Afterwards the working folder, and torch's gradient mode and default
    type, are what they were, and a process that it forked is not here."""

    def __enter__(self) -> None:
        self._process, self._folder = os.getpid(), _working_folder()
        torch = sys.modules.get("torch")  # which what runs here may be the first to import
        self._grad = torch is None or torch.is_grad_enabled()
        self._type = None if torch is None else torch.get_default_dtype()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            end_fork()
        if self._folder is not None and _working_folder() != self._folder:
            with suppress(OSError):  # removed meanwhile
                os.chdir(self._folder)
        torch = sys.modules.get("torch")
        if torch is not None and torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)
        if torch is not None and torch.get_default_dtype() != (self._type or torch.float32):
            torch.set_default_dtype(self._type or torch.float32)


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # removed
        return None


@contextmanager
def no_early_end() -> Iterator[None]:
    """Within `with`, an `os._exit(0)` of this process does not pass for the end of the run."""
    leave, process = os._exit, os.getpid()

    def leave_unfinished(status: int) -> None:
        if status == 0 and os.getpid() == process:
            frame = sys._getframe(1)
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            _say(f"error: {place}: os._exit({status}) ends the run before it is finished; raise an exception instead")
            status = 2
        leave(status)

    os._exit = leave_unfinished  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def training() -> Iterator[None]:
    """Within `with`, this process alone trains: a fork of it ends where it would go on."""
    global _trainer, is_fork
    before, _trainer, is_fork = _trainer, os.getpid(), False
    try:
        with no_early_end():
            yield
    finally:
        if is_fork:
            end_fork()
        _trainer = before


def _note_fork() -> None:
    global is_fork
    is_fork = _trainer is not None


os.register_at_fork(after_in_child=_note_fork)


def end_fork() -> None:
    """End a process that was forked from the one that trains (`is_fork`): two would write to one run."""
    _say(
        f"warning: process {os.getpid()} was forked by code of your own, came back into the run and is ended; "
        "let it end by os._exit(0)"
    )
    os._exit(1)


def _say(sentence: str) -> None:
    if sys.__stderr__ is not None:  # otherwise descriptor 2 may be any file
        with suppress(OSError):  # the reader is gone
            os.write(2, f"lemma: {sentence}\n".encode())
