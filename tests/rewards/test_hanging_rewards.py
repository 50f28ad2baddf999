"""A reward that does not come back stops the run with its name, whatever it waits for."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from pathlib import Path

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.rewards import RewardInput, combine, make_reward

HANGING = """\
import socket, threading, time

def sleeps(item):
    time.sleep(60)

def computes(item):
    while True:
        pass

def forgives(item):
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass

def waits(item):
    threading.Event().wait(60)

def listens(item):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.accept()

def batch(completions, **columns):
    time.sleep(60)

def quick(item):
    time.sleep(0.1)
    return 1.0
"""


def items(count: int) -> list[RewardInput]:
    return [RewardInput("yes", Problem((Message("user", "?"),))) for _ in range(count)]


@pytest.mark.parametrize("name", ["sleeps", "computes", "forgives", "waits", "listens"])
def test_a_hanging_reward_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGING)
    reward = make_reward({"name": "custom", "function": f"{tmp_path / 'mine.py'}:{name}", "seconds": 0.3})
    sentence = rf"mine.py:\d+: reward '{name}' took longer than 0.3 s on the completion 'yes'; make it end sooner"
    began = time.monotonic()
    with pytest.raises(UserError, match=sentence):
        combine([reward], items(3))
    assert time.monotonic() - began < 20


def test_a_hanging_function_of_trl_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGING)
    reward = make_reward({"name": "trl", "function": f"{tmp_path / 'mine.py'}:batch", "seconds": 0.1})
    with pytest.raises(UserError, match=r"reward 'batch' took longer than 0.1 s on each of 3 completions; make it end"):
        combine([reward], items(3))


def test_the_deadline_is_of_one_completion_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGING)
    reward = make_reward({"name": "custom", "function": f"{tmp_path / 'mine.py'}:quick", "seconds": 0.4})
    combine([reward], items(1))  # the thread that looks at the clock stays
    before = signal.getsignal(signal.SIGURG), threading.active_count()
    assert [score.total for score in combine([reward], items(6))] == [1.0] * 6
    assert (signal.getsignal(signal.SIGURG), threading.active_count()) == before


def hangs(file: Path) -> None:
    reward = make_reward({"name": "custom", "function": f"{file}:sleeps", "seconds": 0.2})
    with pytest.raises(UserError, match="took longer"):
        combine([reward], items(1))


def test_a_short_deadline_after_a_long_one_is_kept_in_a_forked_process_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGING)
    long = make_reward({"name": "custom", "function": f"{tmp_path / 'mine.py'}:quick", "seconds": 500})
    began = time.monotonic()
    combine([long], items(1))
    hangs(tmp_path / "mine.py")
    child = multiprocessing.get_context("fork").Process(target=hangs, args=(tmp_path / "mine.py",))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and time.monotonic() - began < 30


def test_elsewhere_than_in_the_main_thread_a_reward_is_computed_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGING)
    reward = make_reward({"name": "custom", "function": f"{tmp_path / 'mine.py'}:quick"})
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.extend(score.total for score in combine([reward], items(2))))
    thread.start()
    thread.join()
    assert found == [1.0, 1.0]
