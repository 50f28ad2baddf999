"""What environments do to a run when they hang, die, raise or talk nonsense: nothing that becomes a reward."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import LemmaWarning, UserError
from lemma.core.types import Outcome, Problem
from lemma.environments import Observation
from lemma.environments.env_handle import EnvFailure
from tests.environments.trouble import alive, processes, said, wait, wait_for_end


@pytest.fixture
def make(make: Any) -> Any:
    """Worlds that are not waited for long."""
    return partial(make, step_seconds=1.5, reset_seconds=1.5, score_seconds=1.5)


@pytest.mark.filterwarnings("ignore::lemma.core.errors.LemmaWarning")
def test_an_action_that_breaks_its_world_twice_is_wrong_and_others_go_on(make: Any) -> None:
    worlds = make()
    other, *broken = [worlds.opened(Problem((), ("7",)), 0) for _ in range(5)]
    assert wait(worlds, other, *broken) == [()] * 5
    assert said(worlds, other, "a") == Observation("1 a")
    for held, word in zip(broken, ["hang", "exit", "kill", "gone"], strict=True):
        assert said(worlds, held, "b") == Observation("1 b")
        answer = said(worlds, held, word)
        assert isinstance(answer, EnvFailure) and answer.is_limit and answer.reason.startswith("limit")
    assert said(worlds, other, "c") == Observation("2 c"), "its world was played again"
    worlds.score(other)
    assert wait(worlds, other) == [Outcome(2.0, True)]
    assert worlds.lost >= 6 and worlds.replayed >= 4


@pytest.mark.filterwarnings("ignore::lemma.core.errors.LemmaWarning")
@pytest.mark.parametrize("word", ["exit once", "gone once"])
def test_what_breaks_once_is_tried_again(make: Any, word: str) -> None:
    worlds = make()
    held = worlds.opened(Problem(()), 0)
    wait(worlds, held)
    assert [said(worlds, held, text) for text in ("a", word)] == [Observation("1 a"), Observation(f"2 {word}")]


@pytest.mark.filterwarnings("ignore::lemma.core.errors.LemmaWarning")
def test_a_world_that_is_played_again_stays_where_it_is_and_is_closed_there(make: Any, tmp_path: Path) -> None:
    worlds = make(workers=2)
    held, other = [worlds.opened(Problem(()), 0) for _ in range(2)]
    wait(worlds, held, other)
    worlds.leave(other)
    while other.worker is not None:
        worlds.poll()
        time.sleep(0.01)
    assert said(worlds, held, "exit once") == Observation("1 exit once")
    assert held.worker in worlds._workers
    assert said(worlds, held, "a") == Observation("2 a")
    assert worlds.replayed == 1
    worlds.leave(held)
    while held.worker is not None:
        worlds.poll()
        time.sleep(0.01)
    assert not any(worker.environments for worker in worlds._workers)
    assert len(list(tmp_path.glob("closed-*"))) == 2


@pytest.mark.filterwarnings("ignore::lemma.core.errors.LemmaWarning")
def test_a_worker_that_dies_after_its_world_did(make: Any) -> None:
    """Both are heard of at the same time: the new try goes to the dead worker first."""
    worlds = make(step_seconds=20.0)
    held = worlds.opened(Problem(()), 0)
    wait(worlds, held)
    pids = processes(worlds)
    worlds.say(held, "gone once dies")
    wait_for_end(pids)
    assert wait(worlds, held) == [Observation("1 gone once dies")]
    assert worlds.lost == 1


@pytest.mark.filterwarnings("ignore::lemma.core.errors.LemmaWarning")
def test_a_world_that_answers_otherwise_when_played_again_is_unknown(make: Any) -> None:
    worlds = make()
    held = worlds.opened(Problem(()), 0)
    wait(worlds, held)
    assert said(worlds, held, "luck").text.startswith("1 luck")
    answer = said(worlds, held, "kill once")
    assert isinstance(answer, EnvFailure) and not answer.is_limit and "differently" in answer.reason


@pytest.mark.filterwarnings("ignore::lemma.core.errors.LemmaWarning")
def test_trouble_outside_of_an_action_is_unknown(make: Any) -> None:
    worlds = make()
    golds = ["reset exit", "reset raise", "score hang", "score raise"]
    held = [worlds.opened(Problem((), (gold,)), 0) for gold in golds]
    first = wait(worlds, *held)
    assert [isinstance(one, EnvFailure) for one in first] == [True, True, False, False]
    for one in held[2:]:
        worlds.score(one)
    both = [*first[:2], *wait(worlds, *held[2:])]
    assert all(isinstance(one, EnvFailure) and not one.is_limit for one in both), both


def test_what_an_environment_says_is_checked(make: Any) -> None:
    worlds = make(step_seconds=30.0)
    held = worlds.opened(Problem(()), 0)
    wait(worlds, held)
    assert said(worlds, held, "odd").text == "half ? a character"
    huge = said(worlds, held, "huge").text
    assert len(huge) == 2 * 64 * 8 and huge.endswith("b")
    for word in ("raise", "leave", "nan"):
        one = worlds.opened(Problem(()), 0)
        wait(worlds, one)
        answer = said(worlds, one, word)
        assert isinstance(answer, EnvFailure) and not answer.is_limit
    with pytest.raises(UserError, match=r"Trouble gave str where Observation is wanted"):
        said(worlds, held, "garbage")


def test_a_close_that_hangs_costs_the_worker_and_nothing_else(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lemma.environments.env_pool.CLOSE_SECONDS", 0.5)
    worlds = make(step_seconds=30.0)
    bad, good = worlds.opened(Problem((), ("close hang",)), 0), worlds.opened(Problem(()), 0)
    wait(worlds, bad, good)
    assert said(worlds, good, "a") == Observation("1 a")
    worlds.leave(bad)
    with pytest.warns(LemmaWarning, match="does not answer"):
        assert said(worlds, good, "b") == Observation("2 b")
    assert worlds.lost == 1


def test_async_calls_of_one_worker_run_together(make: Any) -> None:
    worlds = make("Waiting", step_seconds=30.0)
    held = [worlds.opened(Problem(()), 0) for _ in range(20)]
    wait(worlds, *held)
    began = time.monotonic()
    for one in held:
        worlds.say(one, "a")
    assert wait(worlds, *held) == [Observation("1 a")] * 20
    assert time.monotonic() - began < 3.0, "twenty calls of 0.2 s each"


def test_nothing_is_left_after_the_end(make: Any, tmp_path: Path) -> None:
    worlds = make(workers=2)
    held = [worlds.opened(Problem(()), 0) for _ in range(4)]
    wait(worlds, *held)
    said(worlds, held[0], "child")
    pids = processes(worlds)
    assert len(pids) == 5 and all(map(alive, pids))
    worlds.close()
    wait_for_end(pids)
    assert len(list(tmp_path.glob("closed-*"))) == 4


def test_a_worker_ends_with_its_trainer(make: Any, tmp_path: Path) -> None:
    """Only the trainer's end of the pipe is closed, as `kill -9` does it; the worlds get to be closed."""
    worlds = make()
    idle = worlds.opened(Problem(()), 0)
    wait(worlds, idle)
    said(worlds, idle, "child")
    (worker,) = worlds._workers
    pids = processes(worlds)
    worker.child.process.stdin.close()
    wait_for_end(pids[1:])
    assert len(list(tmp_path.glob("closed-*"))) == 1


def test_a_killed_worker_is_nobodys_fault(make: Any) -> None:
    worlds = make(workers=2)
    held = [worlds.opened(Problem(()), 0) for _ in range(6)]
    wait(worlds, *held)
    assert [said(worlds, one, "a") for one in held] == [Observation("1 a")] * 6
    os.kill(processes(worlds)[-1], signal.SIGKILL)
    with pytest.warns(LemmaWarning, match=r"was lost \(signal 9\) and is replaced"):
        for one in held:
            worlds.say(one, "b")
        assert wait(worlds, *held) == [Observation("2 b")] * 6
