"""How a program ends while others may still be at work: ranks after an error, threads after Ctrl-C."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from lemma.core.terminal import show_error

INTERRUPTED = 130


def run_and_exit(work: Callable[[], int]) -> int:
    """The exit code of a program; where Python's own end could hang or abort, end the process here instead.

    It hangs where an error has left the process groups as they are: taking them down waits for ranks that are gone. It
    aborts where a thread is inside torch at that moment: a daemon thread, or one that an interrupt has left behind.
    """
    try:
        code = work()
    except Exception as error:
        if not _is_in_group() and not _has_daemon_threads():
            raise
        show_error(type(error), error, error.__traceback__)
        code = 1
    if _is_in_group() or code == INTERRUPTED or _has_daemon_threads():
        _exit(code)
    return code


def _exit(code: int) -> NoReturn:
    """What Python does at its end, in its order, without taking down the interpreter."""
    if not _is_in_group():  # there, a thread may wait for a rank that is gone
        _wait_for_threads()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit._run_exitfuncs()
    _flush_files()
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError):  # Ctrl-C also ends a program that our output is piped to
            output.flush()
    os._exit(code)


def _wait_for_threads() -> None:
    """Wait for threads that are no daemons, such as a reward's own, until Ctrl-C."""

    def stop_waiting(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, stop_waiting)
        threading._shutdown()  # type: ignore[attr-defined]


def _flush_files() -> None:
    """Write what buffers of open files still hold. Only regular files: a pipe that nobody reads would block."""
    gc.unfreeze()  # `get_objects` leaves out what is frozen
    for one in gc.get_objects():
        # `isinstance` would ask the objects themselves, and lazy modules then import
        if issubclass(type(one), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(OSError, ValueError):  # closed, detached, a full disk
                if stat.S_ISREG(os.fstat(one.fileno()).st_mode):
                    one.flush()


def _has_daemon_threads() -> bool:
    return any(one.daemon for one in threading.enumerate())


def _is_in_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
