"""One grading worker: answers tasks, and keeps itself within limits.

A task is `{"op": "settle", "gold", "answer", "rules"}`, answered by `{"kind", "reason"}`, or by `{"overrun": why}` if a
limit on CPU time, memory or recursion was hit, `{"error": text}` if the text cannot be handled, or `{"trouble": text}`
if the machine failed. Other systems' graders are asked by `{"op": "compat", "name", "response", "gold", "compat"}` and
answer `{"score"}`.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys
from time import process_time
from types import FrameType
from typing import Any

from lemma.children.child_main import Channel

RECYCLE_AFTER = 5_000
"""Tasks after which a worker is replaced, so that sympy's caches cannot grow forever."""


PACE_STEPS = 200_000
PACE_SECONDS = 0.012
"""CPU seconds of `_pace` on the reference machine of the limits; a slower machine gets more seconds."""

_deadline = float("inf")


class Overrun(BaseException):
    """A task used up its CPU time. Not an Exception, so that no library swallows it."""


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    """A signal from elsewhere arrives before the time is used up, and is ignored."""
    if process_time() >= _deadline:
        raise Overrun


def _pace() -> float:
    """CPU seconds of a fixed piece of work."""
    start, value = process_time(), 1
    for step in range(PACE_STEPS):
        value = (value * 31 + step) % 1_000_003
    return process_time() - start


def allowed_seconds(cpu_seconds: float, pace: float) -> float:
    """The limit on this machine: the same work, not the same time; at most eight times as long."""
    return cpu_seconds * min(8.0, max(1.0, pace / PACE_SECONDS))


def _mapped() -> int:
    """Bytes of address space in use, 0 if unknown."""
    try:
        with open("/proc/self/statm") as handle:
            return int(handle.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _within_hard(limit: int, kind: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _limit_memory(megabytes: int) -> bool:
    """Allow this much beyond what is mapped now; a task that needs more gets a MemoryError. False if less is left."""
    mapped = _mapped()
    if not mapped:
        return True
    wanted = mapped + megabytes * 2**20
    limit = _within_hard(wanted, resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return limit == wanted


def _start_clock(cpu_seconds: float) -> None:
    """Raise after this much CPU time, again every half second, and die by SIGXCPU a little later."""
    global _deadline
    spent = process_time()
    limit = _within_hard(int(spent + cpu_seconds) + 2, resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    _deadline = spent + cpu_seconds
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.5)


def _stop_clock() -> None:
    global _deadline
    _deadline = float("inf")
    signal.setitimer(signal.ITIMER_PROF, 0)


def _perform(task: dict[str, Any]) -> dict[str, Any]:
    from lemma.grading.grader import PendingGrade
    from lemma.grading.limits import GoldLimit
    from lemma.grading.rules import Rules
    from lemma.grading.symbolic import settle

    if task["op"] == "compat":
        from lemma.grading.compat import COMPAT

        try:
            return {"score": COMPAT[task["name"]](task["response"], task["gold"], compat=task["compat"])}
        except GoldLimit:
            return {"score": None}
    rules = Rules.model_validate(task["rules"])
    kind, reason = settle(PendingGrade(task["gold"], task["answer"], "", rules))
    return {"kind": kind, "reason": reason}


def _answer(task: dict[str, Any], cpu_seconds: float, megabytes: int) -> dict[str, Any]:
    whole = _limit_memory(megabytes)
    try:
        _start_clock(cpu_seconds)
        try:
            return _perform(task)
        finally:
            _stop_clock()
    except Overrun:
        return {"overrun": "cpu"}
    except MemoryError:
        return {"overrun": "memory"} if whole else {"trouble": "the address space of this process is limited"}
    except RecursionError:
        return {"overrun": "recursion"}
    except (OSError, ImportError) as error:
        return {"trouble": f"{type(error).__name__}: {error}"[:500]}
    except Exception as error:  # noqa: BLE001  (reported to the service, which decides)
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def serve(channel: Channel) -> None:
    """Answer tasks until the input ends, or until memory or caches have grown enough for a fresh start."""
    import lemma.grading.symbolic

    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(3_000)
    lemma.grading.symbolic.warm_up()
    signal.signal(signal.SIGPROF, _on_alarm)
    limits = channel.receive()
    if limits is None:
        return
    cpu_seconds = allowed_seconds(limits["cpu_seconds"], min(_pace() for _ in range(3)))
    megabytes = limits["megabytes"]
    most = _mapped() + megabytes * 2**20
    channel.send({"cpu_seconds": cpu_seconds})
    for _ in range(RECYCLE_AFTER):
        task = channel.receive()
        if task is None:
            return
        answer = _answer(task, cpu_seconds, megabytes)
        channel.send(answer)
        if "overrun" in answer or _mapped() > most:
            return
