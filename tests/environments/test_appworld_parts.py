"""What AppWorld's room does without AppWorld: prompts, code in replies, rewards, measures, and what is refused."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from lemma.cli.env import run_setup as set_up_command
from lemma.core.errors import UserError
from lemma.core.types import Problem
from lemma.environments import AppWorldOptions, Attempt
from lemma.environments.confined.syscall_filter import (
    AUDIT,
    CLONE,
    FCNTL,
    IOCTL,
    PRLIMIT,
    REFUSED,
    SOCKETPAIR,
    WITHOUT_EFFECT,
    numbers,
    program,
)
from lemma.plugins.appworld.agents import Agent, code_of, heard
from lemma.plugins.appworld.runner_client import RunnerSettings, connect, stop_all
from lemma.plugins.appworld.task_reward import Tests as Found
from lemma.plugins.appworld.task_reward import goal_completion, outcome


@pytest.mark.parametrize(
    ("agent", "text", "code"),
    [
        ("conversation", "I look.\n```python\nprint(1)\n```\nThen.", "print(1)"),
        ("conversation", "```py\na = 1\n```\nand\n```python\nb = 2\n```", "a = 1\nb = 2"),
        ("conversation", "```python\nprint(1)", "print(1)"),
        ("conversation", "print(1)", ""),
        ("conversation", "```\nprint(1)\n```", ""),
        ("rebuilt", "<think>x</think><code>print(1)</code>", "print(1)"),
        ("rebuilt", "<think>x</think><code>a\n</code> <code>b</code>", "b"),
        ("rebuilt", "<code>```python\nprint(1)\n```</code>", "print(1)"),
        ("rebuilt", "<think>x</think>\nprint(1)", "print(1)"),
        ("rebuilt", "<think>cut off", ""),
        ("rebuilt", "<code>print(1", "print(1"),
    ],
)
def test_code_is_found_in_what_an_agent_says(agent: Agent, text: str, code: str) -> None:
    assert code_of(agent, text) == code


def test_output_is_fenced() -> None:
    assert heard("3\n\n") == "Output:\n```\n3\n```"


@pytest.mark.parametrize(
    ("found", "worth", "nothing_pays", "reward"),
    [
        (Found(4, 4, 1, True, True), "tests", False, 1.0),
        (Found(1, 4, 1, False, True), "tests", False, 0.0),  # did nothing and called it done
        (Found(1, 4, 1, False, True), "tests", True, 0.25),  # what LOOP pays for it
        (Found(3, 4, 1, False, True), "tests", False, 2 / 3),
        (Found(2, 4, 2, False, True), "tests", False, 0.0),  # one test won, one broken
        (Found(0, 4, 2, False, True), "tests", False, 0.0),
        (Found(3, 4, 1, False, False), "tests", False, 0.0),  # never called it done
        (Found(3, 4, 1, False, True), "success", False, 0.0),
        (Found(4, 4, 1, True, True), "success", False, 1.0),
        (Found(0, 4, 1, False, True), "compat", False, 10.0),
        (Found(4, 4, 1, True, False), "compat", False, 0.0),
        (Found(0, 2, 2, False, True), "tests", False, 0.0),
    ],
)
def test_rewards(found: Found, worth: Any, nothing_pays: bool, reward: float) -> None:
    given = outcome(found, worth, nothing_pays)
    assert given.reward == pytest.approx(reward) and given.success == found.success


def attempts(results: dict[str, list[bool | None]], level: str = "1") -> list[Attempt]:
    return [
        Attempt(Problem((), id=name, level=level), sample, 1, success)
        for name, every in results.items()
        for sample, success in enumerate(every)
    ]


def test_goal_completion_by_hand() -> None:
    easy = attempts({"a_1": [True, True], "a_2": [True, False], "b_1": [None, True]})
    hard = attempts({"c_1": [False, None], "c_2": [None, True]}, level="3")
    found = goal_completion([*easy, *hard])
    assert found["tgc/difficulty_1"] == [1.0, 1.0, 1.0, 0.0, 1.0], "what is unknown counts nowhere"
    # Scenario a: right in sample 0, not in 1. Scenario b: unknown in 0, right in 1.
    assert sorted(found["sgc/difficulty_1"]) == [0.0, 1.0, 1.0]
    # Scenario c: one failure settles sample 0; in sample 1 nobody knows.
    assert found["sgc/difficulty_3"] == [0.0] and found["tgc/difficulty_3"] == [0.0, 1.0]
    assert len(found["tgc"]) == 7 and sorted(found["sgc"]) == [0.0, 0.0, 1.0, 1.0]


def make_root(folder: Path) -> Path:
    """Two tasks on disk, without databases: enough to read a split."""
    for name, difficulty in (("aaaaaaa_1", 1), ("bbbbbbb_1", 3)):
        task = folder / "data" / "tasks" / name
        (task / "ground_truth").mkdir(parents=True)
        person = {"first_name": "Jo", "last_name": "Ek", "email": "jo@ek.se", "phone_number": "1"}
        specs = {"instruction": f"Do {name}.", "supervisor": person, "datetime": "2023-05-18T12:00:00"}
        (task / "specs.json").write_text(json.dumps(specs))
        (task / "ground_truth" / "metadata.json").write_text(json.dumps({"difficulty": difficulty}))
    (folder / "data" / "datasets").mkdir()
    (folder / "data" / "datasets" / "train.txt").write_text("aaaaaaa_1:tag\nbbbbbbb_1\n")
    return folder


def test_a_split_is_read_in_its_order_and_by_difficulty(tmp_path: Path) -> None:
    root = str(make_root(tmp_path))
    both = AppWorldOptions(root=root).problems("train")
    assert [(one.id, one.level, one.subject) for one in both] == [
        ("aaaaaaa_1", "1", "aaaaaaa"), ("bbbbbbb_1", "3", "bbbbbbb"),
    ]  # fmt: skip
    assert "Do aaaaaaa_1." in both[0].question and "Jo Ek" in both[0].question and "jo@ek.se" in both[0].question
    assert [one.id for one in AppWorldOptions(root=root, difficulty=[3]).problems("train")] == ["bbbbbbb_1"]
    with pytest.raises(UserError, match="no task of difficulty"):
        AppWorldOptions(root=root, difficulty=[2]).problems("train")
    with pytest.raises(UserError, match=r"no split 'trains'.*did you mean 'train'"):
        AppWorldOptions(root=root).problems("trains")


def test_what_is_missing_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no virtual environment of AppWorld.*lemma env setup appworld --dir"):
        AppWorldOptions(root=str(tmp_path)).check()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    with pytest.raises(UserError, match=r"no data of AppWorld.*appworld download data"):
        AppWorldOptions(root=str(tmp_path)).check()
    with pytest.raises(UserError, match="no task of AppWorld"):
        AppWorldOptions(root=str(tmp_path)).make().reset(Problem((), id="p"), 0)


def test_setup_goes_on_where_it_is_set_up_and_says_how_to_get_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from argparse import Namespace

    from lemma.plugins.appworld.appworld_setup import STAMP, VERSION

    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / STAMP).write_text(VERSION)
    assert set_up_command(Namespace(name="appworld", dir=str(tmp_path), python="python-that-is-not-there")) == 0
    assert f"appworld download data --root {tmp_path}" in capsys.readouterr().out
    (tmp_path / "venv" / STAMP).write_text("0.1.0")
    with pytest.raises(UserError, match=r"cannot make a virtual environment.*--python"):
        set_up_command(Namespace(name="appworld", dir=str(tmp_path), python="python-that-is-not-there"))


def test_a_runner_that_does_not_start_says_why(tmp_path: Path) -> None:
    settings = RunnerSettings(sys.executable, str(tmp_path), 256, 5, "auto")
    with pytest.raises(UserError, match=r"AppWorld does not start: exit code 1: .*No module named 'appworld'"):
        connect(settings)
    stop_all()


@pytest.mark.parametrize("machine", AUDIT)
def test_the_filter_of_system_calls(machine: str) -> None:
    """The program, run by hand: what it says to a call with these flags."""
    architecture, clone = AUDIT[machine], CLONE[machine]
    lines = list(struct.iter_unpack("=HBBI", program(machine)))

    def verdict(number: int, flags: int = 0, second: int = 0, kind: int = architecture) -> int:
        data, place, value = {0: number, 4: kind, 16: flags, 24: second}, 0, 0
        while True:
            operation, yes, no, operand = lines[place]
            if operation == 0x06:
                return operand
            if operation == 0x20:
                value = data[operand]
                place += 1
                continue
            if operation == 0x54:
                value &= operand
                place += 1
                continue
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
            place += 1 + (yes if holds else no)

    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    assert verdict(0) == allow and verdict(10**5) == allow
    assert all(verdict(number) == refuse for number in numbers(REFUSED, machine))
    assert all(verdict(number) == 0x00050000 for number in numbers(WITHOUT_EFFECT, machine)), "as if it were done"
    assert verdict(435) == unknown, "clone3 cannot be looked into"
    assert verdict(clone) == refuse and verdict(clone, flags=0x10000) == allow, "threads are not processes"
    assert verdict(PRLIMIT[machine]) == allow and verdict(PRLIMIT[machine], flags=7) == refuse, "its own limits only"
    assert [verdict(FCNTL[machine], second=command) for command in (1, 8, 10, 15)] == [allow, refuse, refuse, refuse]
    assert [verdict(IOCTL[machine], second=command) for command in (0x5421, 0x8901)] == [allow, 0x00050019]
    assert [verdict(SOCKETPAIR[machine], second=kind) for kind in (1, 0x80801, 2, 5)] == [allow, allow, refuse, refuse]
    assert verdict(0, kind=architecture ^ 1) == kill and verdict(0x40000000) == refuse
