"""`python ...` forked from a process that has torch, transformers and Lemma imported: at once, where a fresh one takes
seconds of a core. For tests of what a process does; those of how one starts take `sys.executable`."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any, NoReturn, Self

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *(
            "lemma.cli.train",
            "lemma.cli.eval",
            "lemma.recipe",
            "lemma.runs.run",
            "lemma.reporting",
            "lemma.planning.run_plan",
        ),
        *("lemma.stages.supervised", "lemma.stages.reinforcement.rl_loop", "lemma.evaluation.evaluator"),
        *(
            "lemma.models.tiny",
            "lemma.engines.native.engine",
            "lemma.engines.native.engine_probe",
            "lemma.cluster.rank_program",
        ),
        *("transformers.models.qwen3.modeling_qwen3", "sentencepiece", "peft", "torch.distributed"),
        *("tests.preloaded", "tests.models.small", "tests.cluster.crew"),
    ]
)


def _end_what_is_left(owner: int) -> None:
    """A test that failed may have left a process, for whose end Python would wait."""
    if os.getpid() == owner:
        for process in multiprocessing.active_children():
            process.kill()


atexit.register(_end_what_is_left, os.getpid())


class Passed:
    """An open file that goes along to the new process."""

    def __init__(self, number: int):
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, passed: Any) -> None:
        self.number = passed.detach()


class Python:
    """`python WORDS` as `subprocess.Popen` has it: `-m MODULE`, `-c CODE` or a file, and what follows.

    `stdout` and `stderr` are open files, or `subprocess.PIPE`, `STDOUT`, `DEVNULL`; pipes are read as text.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
    ):
        self._words = [str(word) for word in words]
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        mine: list[int] = []
        files = [self._file(number, given, mine) for number, given in enumerate((stdin, stdout, stderr))]
        if stderr == subprocess.STDOUT:
            files[2] = files[1]
        place = str(cwd or os.getcwd())
        arguments = (self._words, place, dict(os.environ if env is None else env), [*map(Passed, files)])
        self._process = CONTEXT.Process(target=_live, args=arguments)
        self._process.start()
        for number in mine:
            os.close(number)
        self.pid = self._process.pid or 0

    def _file(self, number: int, given: Any, mine: list[int]) -> int:
        """The number of the file that is to be the new process's file of this number."""
        if given is None or given == subprocess.STDOUT:
            return number
        if given == subprocess.DEVNULL:
            mine.append(os.open(os.devnull, os.O_RDWR))
            return mine[-1]
        if given == subprocess.PIPE:
            reading, writing = os.pipe()
            mine.append(writing)
            setattr(self, "stdout" if number == 1 else "stderr", os.fdopen(reading))
            return writing
        return given if isinstance(given, int) else int(given.fileno())

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it writes from now on, and its end."""
        end = None if timeout is None else time.monotonic() + timeout
        texts = ["", ""]

        def read(place: int, file: IO[str]) -> None:
            with file:
                texts[place] = file.read()

        files = [(place, file) for place, file in enumerate((self.stdout, self.stderr)) if file]
        threads = [threading.Thread(target=read, args=one, daemon=True) for one in files]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        self.wait(None if end is None else max(0.1, end - time.monotonic()))
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self.stdout, self.stderr):
            if file:
                file.close()
        self.wait()


def run(
    words: Sequence[str | Path],
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 500.0,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of the same words, with what it wrote."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Python(words, cwd, env, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(words), code, out.read(), err.read())


# --- in the new process --------------------------------------------------------------------------------------------


def _live(words: list[str], cwd: str, env: dict[str, str], files: list[Passed]) -> NoReturn:
    import torch

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, file in enumerate(files):
        os.dup2(file.number, number)
    for file in files:
        os.close(file.number)
    # The objects stay: handlers of logs hold them.
    sys.stdin = open(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    _end(_code_of(words))


def _code_of(words: list[str]) -> int:
    """Run the program; its exit code, as Python gives it."""
    try:
        sys.path.insert(0, "")
        match words:
            case ["-m", module, *_]:
                sys.argv = words[1:]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case ["-c", code, *_]:
                sys.argv = ["-c", *words[2:]]
                main = sys.modules["__main__"]
                exec(compile(code, "<string>", "exec"), main.__dict__)
            case [file, *_]:
                sys.argv = words
                runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 (told as Python tells it)
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """What Python does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code)
