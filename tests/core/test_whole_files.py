"""Files that are whole or absent, whoever else writes them."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lemma.core.files import write_whole
from lemma.core.whole_files import WholeFiles
from tests.core.disk_calls import disk_calls


def test_writers_with_the_same_process_number_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Threads have one number between them, as processes on two machines or in two containers may."""
    path = tmp_path / "shared.json"
    texts = [f"{writer}" * 2000 for writer in range(4)]
    with ThreadPoolExecutor(len(texts)) as writers:
        list(writers.map(lambda number: write_whole(path, texts[number % len(texts)]), range(80)))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_the_last_of_several_files_comes_when_the_others_are_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with disk_calls(tmp_path) as calls, WholeFiles(tmp_path) as files:
        for name in "abc":
            files.write(name, name * 9)
        files.write("last", b"done")
        assert (tmp_path / "a").read_text() == "old"
    assert sorted(calls[:4]) == ["sync a", "sync b", "sync c", "sync last"]
    assert calls[4:] == ["name a", "name b", "name c", "sync folder", "name last", "sync folder"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        **{name: name * 9 for name in "abc"},
        "last": "done",
    }


def test_a_single_file_needs_no_sync_for_others(tmp_path: Path) -> None:
    with disk_calls(tmp_path) as calls, WholeFiles(tmp_path / "new") as files:
        files.write("only", "")
    assert calls == ["sync only", "name only", "sync folder"]


def test_several_files_are_synced_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, sync = threading.Barrier(3, timeout=60), os.fsync

    def fsync(handle: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            meeting.wait()  # breaks if one comes after the other
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with WholeFiles(tmp_path) as files:
        for name in "abc":
            files.write(name, name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_where_one_cannot_be_written_none_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, failed = os.fsync, []

    def fsync(handle: int) -> None:
        if not failed:
            failed.append(handle)
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"), WholeFiles(tmp_path) as files:
        for name in "abc":
            files.write(name, name)
    assert not list(tmp_path.iterdir())


def test_what_was_begun_is_gone_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), WholeFiles(tmp_path) as files:
        files.write("a", "a")
        files.write("b", str(1 // 0))
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_files_are_synced_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, written, pressed = os.fsync, threading.Event(), threading.Lock()

    def fsync(handle: int) -> None:
        written.wait()
        time.sleep(0.2)  # the main thread waits for this one now
        if pressed.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt), WholeFiles(tmp_path) as files:
        for name in "abcdefghijkl":  # more than are written at once
            files.write(name, name)
        written.set()
    assert not list(tmp_path.iterdir())
