"""One grading worker: reads tasks from standard input, answers on standard output, and keeps itself within limits.

Messages are JSON lines in both directions, so nothing that a model wrote is ever unpickled or evaluated. A task is
`{"op": "settle", "gold", "answer", "rules"}` , answered `{"kind", "reason"}`, or `{"overrun": why}` where a limit of
CPU time, memory or recursion was hit, or `{"error": text}`. The graders of other systems are asked by
`{"op": "compat", "name", "response", "gold", "compat"}` and answer `{"score"}`.
Run as `python -m lemma.grading.worker CPU_SECONDS MEGABYTES`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from types import FrameType
from typing import Any, BinaryIO

RECYCLE_AFTER = 5_000
"""Tasks after which a worker leaves, so that caches inside sympy cannot grow for ever."""


class Overrun(BaseException):
    """The CPU time of a task is spent. Not an Exception, so that no library swallows it."""


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    raise Overrun


def _limit_memory(megabytes: int) -> None:
    """Allow so much beyond what is mapped now; a task that wants more gets a MemoryError."""
    pages = int(open("/proc/self/statm").read().split()[0]) if os.path.exists("/proc/self/statm") else 0
    limit = pages * resource.getpagesize() + megabytes * 2**20
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _start_clock(cpu_seconds: float) -> None:
    """An exception after that much CPU time, again every half second, and death by SIGXCPU a little later."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = usage.ru_utime + usage.ru_stime
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(spent + cpu_seconds) + 2, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.5)


def _stop_clock() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)


def _perform(task: dict[str, Any]) -> dict[str, Any]:
    from lemma.grading.grade import Pending
    from lemma.grading.rules import Rules
    from lemma.grading.symbolic import probe, settle

    if task["op"] == "compat":
        from lemma.grading.compat import COMPAT

        return {"score": COMPAT[task["name"]](task["response"], task["gold"], compat=task["compat"])}
    if task["op"] == "probe":
        probe(task["gold"])
        return {"kind": "right", "reason": "exact"}
    rules = Rules.model_validate(task["rules"])
    kind, reason = settle(Pending(task["gold"], task["answer"], "", rules))
    return {"kind": kind, "reason": reason}


def _answer(task: dict[str, Any], cpu_seconds: float) -> dict[str, Any]:
    try:
        _start_clock(cpu_seconds)
        try:
            return _perform(task)
        finally:
            _stop_clock()
    except Overrun:
        return {"overrun": "cpu"}
    except MemoryError:
        return {"overrun": "memory"}
    except RecursionError:
        return {"overrun": "recursion"}
    except Exception as error:  # noqa: BLE001  (reported to the service, which decides)
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def serve(tasks: BinaryIO, answers: BinaryIO, cpu_seconds: float, megabytes: int) -> None:
    """Answer tasks until the input ends."""
    import lemma.grading.symbolic

    lemma.grading.symbolic.warm_up()
    signal.signal(signal.SIGPROF, _on_alarm)
    _limit_memory(megabytes)
    answers.write(b'{"ready": true}\n')
    answers.flush()
    for count, line in enumerate(tasks, start=1):
        answer = _answer(json.loads(line), cpu_seconds)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if "overrun" in answer or count >= RECYCLE_AFTER:
            return


def main() -> None:
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.setrecursionlimit(3_000)
    serve(sys.stdin.buffer, answers, float(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
