"""Worker processes of environments: what is started in them ends with them, and what they hear and say is their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import LemmaWarning
from lemma.core.types import Problem
from lemma.environments import CustomWorld, Observation
from lemma.environments.agent_pool import AgentPool
from lemma.environments.env_handle import EnvFailure
from lemma.environments.openings import opened_all
from tests.environments.trouble import STRAY, alive, processes, said, wait, wait_for_end


@pytest.mark.parametrize("way", ["closed", "killed", "trainer gone"])
@pytest.mark.filterwarnings("ignore::lemma.core.errors.LemmaWarning")
def test_what_left_its_session_ends_with_the_worker(make: Any, way: str, tmp_path: Path) -> None:
    worlds = make()
    held = worlds.opened(Problem(()), 0)
    wait(worlds, held)
    said(worlds, held, "daemon")
    stray = int((tmp_path / "daemon").read_text())
    watcher, worker, *_ = processes(worlds)
    assert alive(stray) and os.getsid(stray) not in (watcher, worker)
    if way == "closed":
        worlds.close()
    elif way == "killed":
        os.kill(worker, signal.SIGKILL)
    else:
        worlds._workers[0].child.process.stdin.close()
    wait_for_end([stray, worker])


def test_an_environment_reads_no_orders(make: Any) -> None:
    worlds = make(step_seconds=20.0)
    held = worlds.opened(Problem(()), 0)
    wait(worlds, held)
    assert said(worlds, held, "reads") == Observation("1 reads")


def test_whatever_is_raised_costs_one_episode(make: Any) -> None:
    for kind in ("Trouble", "Waiting"):
        worlds = make(kind, step_seconds=30.0)
        for word in ("abort", "leave"):
            held = worlds.opened(Problem(()), 0)
            wait(worlds, held)
            answer = said(worlds, held, word)
            assert isinstance(answer, EnvFailure) and not answer.is_limit, (kind, word)
        held = worlds.opened(Problem(()), 0)
        wait(worlds, held)
        assert said(worlds, held, "a") == Observation("1 a")
        assert worlds.lost == 0


def test_an_async_call_that_hangs_costs_no_worker(make: Any) -> None:
    """Nor does a world that cannot be closed then."""
    worlds = make("Waiting", step_seconds=2.0)
    hung, other = worlds.opened(Problem((), ("stuck",)), 0), worlds.opened(Problem(()), 0)
    wait(worlds, hung, other)
    worlds.say(hung, "linger")
    assert said(worlds, other, "a") == Observation("1 a")
    answer = wait(worlds, hung)[0]
    assert isinstance(answer, EnvFailure) and answer.is_limit
    assert said(worlds, other, "b") == Observation("2 b")
    assert worlds.lost == worlds.replayed - 1 == 0, "one more try of the call that hangs"


def test_an_answer_that_nobody_reads_in_time_was_still_given_in_time(make: Any) -> None:
    worlds = make(step_seconds=2.5, worker_calls=2)
    held = [worlds.opened(Problem(()), 0) for _ in range(2)]
    wait(worlds, *held)
    before = [one.seconds for one in held]
    for one in held:
        worlds.say(one, "late accents")
    time.sleep(3.5)
    for answer in wait(worlds, *held):
        assert isinstance(answer, Observation) and len(answer.results) == 100, "more than a pipe holds"
    assert worlds.lost == 0
    for one, seconds in zip(held, before, strict=True):
        assert 0.7 <= one.seconds - seconds < 2.4


def test_a_worker_that_stops_in_the_middle_of_an_answer_is_ended(make: Any) -> None:
    worlds = make(step_seconds=2.0)
    held = worlds.opened(Problem(()), 0)
    wait(worlds, held)
    worlds.say(held, "accents")
    time.sleep(0.8)  # the pipe is full
    os.kill(processes(worlds)[1], signal.SIGSTOP)
    with pytest.warns(LemmaWarning, match="does not answer"):
        answer = wait(worlds, held)[0]
    assert isinstance(answer, Observation) and worlds.lost == 1


def test_problems_are_opened_a_few_at_a_time(place: str, tmp_path: Path) -> None:
    spec = {"class": f"{place}:Crowd", "options": {"notes": str(tmp_path)}, "workers": 1}
    problems = [Problem((), (str(number),)) for number in range(100)]
    opened = opened_all(CustomWorld.model_validate(spec), problems, 0)
    assert [one.messages[0].content.split()[0] for one in opened] == [str(number) for number in range(100)]
    crowd = [int(one.messages[0].content.split()[1]) for one in opened]
    assert max(crowd) <= 8, "worlds that were open at the same time"


AGENT = f"""
import os, sys, time
{STRAY}
def solve(problem, base_url, api_key):
    leave_stray(problem.gold)
    sys.stderr.write("x" * 3_000_000)
    return 1.0
"""


def test_what_an_agent_starts_ends_with_its_process_and_what_it_prints_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    settings = {"agent": f"{tmp_path / 'agent.py'}:solve", "command": None, "score": None, "options": {}}
    pool = AgentPool(settings, workers=1, at_once=1)
    try:
        pool.begin(0, Problem((), (str(tmp_path / "stray"),)), 0, "http://127.0.0.1:1/v1", "key", 60.0)
        results, until = [], time.monotonic() + 60
        while not results and time.monotonic() < until:
            results = pool.look()
            time.sleep(0.02)
        assert [one.outcome.reward for one in results] == [1.0]
        (worker,) = pool._workers
        pool.look()
        assert os.fstat(worker._own_stderr.fileno()).st_size < 2**20
        stray = int((tmp_path / "stray").read_text())
        assert alive(stray)
    finally:
        pool.close()
    wait_for_end([stray])
