"""Files that survive a crash: whole-or-absent writes, append-only JSON lines with a torn tail cut off, and a thread for
what may be done meanwhile."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from lemma.core import outside
from lemma.core.faults import fault_point


def sync_folder(folder: Path) -> None:
    """Make a rename or a creation in this folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def from_json(text: str | bytes) -> Any:
    """The content of a file that may be anybody's: what is nested too deeply is no JSON either."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def leads_out(path: str | Path, folder: str | Path) -> bool:
    """Whether this is a link to what is not in that folder."""
    return os.path.islink(path) and not (os.path.realpath(path) + os.sep).startswith(os.path.realpath(folder) + os.sep)


def detach(path: Path) -> None:
    """Have a file that has other names too (hard links) be one of its own: what is appended to it is appended here
    alone."""
    if path.is_file() and path.stat().st_nlink > 1:
        write_whole(path, path.read_bytes())


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file so that at any instant either the old or the new content is there, never a mixture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = hidden_path(path)
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def hidden_path(path: Path) -> Path:
    # Two machines that share a folder may have processes of the same number.
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def write_synced(path: Path, data: bytes | str) -> None:
    with open(path, "wb") as handle:
        handle.write(data.encode() if isinstance(data, str) else data)
        handle.flush()
        os.fsync(handle.fileno())


def use_umask(folder: Path, pattern: str = "*.safetensors") -> None:
    """Give files of this folder the mode of any new file: safetensors lets nobody but the owner read its own."""
    probe = folder / f".mode.{secrets.token_hex(4)}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.glob(pattern):
        with suppress(OSError):  # some network file systems have no modes
            path.chmod(mode)


class JsonLines:
    """An append-only file of JSON rows; a line is either whole or not there when the file is opened again."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        detach(path)
        self._handle: BinaryIO = open(path, "ab")
        self._is_synced = False
        self._failure: OSError | None = None
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a torn tail
            self.truncate(whole)

    @property
    def size(self) -> int:
        """Bytes written so far; a later `truncate` to this size forgets everything after now."""
        return self._handle.seek(0, os.SEEK_END)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Rows that come together are written together: a file system may take a while for each write."""
        self.append_lines([json.dumps(row, ensure_ascii=False) for row in rows])

    def append_lines(self, lines: Sequence[str]) -> bytes:
        """Rows that are JSON already, each on one line; what was written."""
        if not lines:
            return b""
        if outside.is_fork:
            outside.end_fork()
        if self._failure is not None:  # the last line may be half a line, and nothing may follow it
            raise self._failure
        self._is_synced = False
        data = "".join(f"{line}\n" for line in lines).encode()
        middle = (data.rfind(b"\n", 0, -1) + 1 + len(data)) // 2
        try:
            self._handle.write(data[:middle])
            self._handle.flush()
            for _ in lines:
                fault_point("jsonl.mid_line")
            self._handle.write(data[middle:])
            self._handle.flush()
        except OSError as error:
            self._failure = error
            raise
        return data

    def truncate(self, size: int) -> None:
        self._is_synced = False
        self._handle.flush()
        os.truncate(self.path, size)

    def sync(self) -> None:
        """All rows are on the disk. Nothing is done where they are already."""
        if self._is_synced:
            return
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._is_synced = True

    def close(self, *, sync: bool = True) -> None:
        if sync:
            self.sync()
        self._handle.close()


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a file written by `JsonLines`, also compressed; a torn last line is passed over."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as handle:
        for line in handle:
            if line.endswith("\n") and not line.isspace():
                yield from_json(line)


class BackgroundWork:
    """Small file operations in a thread, off the critical path: one at a time, in the order submitted. A task's
    exception is raised by the next `wait`, or at the end of the `with` block."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._pending: list[Future[None]] = []

    def submit(self, task: Callable[[], None]) -> None:
        self._pending.append(self._thread.submit(task))

    def wait(self) -> None:
        """Wait for all tasks submitted so far."""
        pending, self._pending = self._pending, []
        wait(pending)
        for future in pending:
            future.result()

    def __enter__(self) -> BackgroundWork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self.wait()
