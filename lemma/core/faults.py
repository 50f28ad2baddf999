"""Named places where a test can make a process die, fail or stop, to prove that what is on disk survives it.

`LEMMA_FAULT=checkpoint.before_rename:3` kills the process, as `kill -9` would, the third time it gets there;
`LEMMA_FAULT=checkpoint.mid_write:1:ENOSPC` raises that operating-system error instead, and
`LEMMA_FAULT=stage.step_end:2:SIGTERM` sends the process that signal. With `@1` behind it, only rank 1 is meant, and
only until the ranks are started again. Without the variable this costs a dictionary look-up.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter

_visits: Counter[str] = Counter()


def fault_point(name: str) -> None:
    wanted = os.environ.get("LEMMA_FAULT")
    if not wanted:
        return
    wanted, _, rank = wanted.partition("@")
    place, _, rest = wanted.partition(":")
    if place != name or (rank and not _is_meant(rank)):
        return
    visit, _, action = rest.partition(":")
    _visits[name] += 1
    if _visits[name] != int(visit or 1):
        return
    if action.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, action))
        return
    if action:
        code = getattr(errno, action)
        raise OSError(code, os.strerror(code))
    os.kill(os.getpid(), signal.SIGKILL)


def _is_meant(rank: str) -> bool:
    attempt = os.environ.get("LEMMA_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    return os.environ.get("RANK", "0") == rank and attempt == "0"
