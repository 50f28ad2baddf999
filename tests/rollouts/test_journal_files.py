"""Journals on disk: compressed once their step is finished, bounded in number, and never trusted after a change."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import LemmaWarning, UserError
from lemma.planning.plan_words import describe
from lemma.rollouts import Journal, read_episodes
from lemma.rollouts.journal import journal_path, tidy
from lemma.rollouts.journal_reader import list_journals
from tests.algorithms import toy
from tests.rollouts.scripted import Silent
from tests.rollouts.test_groups import Step, half_right, numbers, task


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(tmp_path, [task(i) for i in range(6)])


def test_a_compressed_journal_says_the_same_and_takes_less_room(step: Step) -> None:
    first = step.run(half_right)
    plain = journal_path(step.folder, 1)
    before, size = list(read_episodes(plain)), plain.stat().st_size
    tidy(step.folder, 1, None, needed_after=0)
    assert [path.name for path in step.folder.iterdir()] == ["step-000001.jsonl.gz"]
    assert plain.with_name("step-000001.jsonl.gz").stat().st_size < size / 3
    assert repr(list(read_episodes(plain))) == repr(before)
    assert numbers(step.run(Silent())) == numbers(first)
    assert not plain.exists(), "reading a complete journal writes nothing"


def test_only_so_many_steps_stay_and_none_that_a_run_would_need(tmp_path: Path) -> None:
    for number in range(1, 11):
        Journal(journal_path(tmp_path, number)).finish()
    tidy(tmp_path, 9, keep=3, needed_after=4)
    left = [path.name for path in list_journals(tmp_path.iterdir())]
    assert left == [f"step-{n:06d}.jsonl.gz" for n in (5, 6, 7, 8, 9)] + ["step-000010.jsonl"]
    tidy(tmp_path, 10, keep=3, needed_after=8)
    assert [path.name for path in list_journals(tmp_path.iterdir())] == [f"step-{n:06d}.jsonl.gz" for n in (8, 9, 10)]


def test_dying_while_a_journal_is_compressed_loses_nothing(step: Step) -> None:
    first = step.run(half_right)
    code = (
        "from pathlib import Path; from lemma.rollouts.journal import tidy; "
        f"tidy(Path({str(step.folder)!r}), 1, None, 0)"
    )
    killed = subprocess.run([sys.executable, "-c", code], env={**os.environ, "LEMMA_FAULT": "journal.compressed"})
    (step.folder / ".step-000001.jsonl.gz.123.tmp").touch()
    assert killed.returncode == -9 and len(list(step.folder.iterdir())) == 3
    assert [path.name for path in list_journals(step.folder.iterdir())] == ["step-000001.jsonl"]
    assert numbers(step.run(Silent())) == numbers(first)
    tidy(step.folder, 1, None, needed_after=0)
    assert [path.name for path in step.folder.iterdir()] == ["step-000001.jsonl.gz"]


def one_missing(path: Path) -> None:
    lines = lines_of(path)
    path.write_text("".join([*lines[:3], *lines[4:]]))


def one_foreign(path: Path) -> None:
    lines = lines_of(path)
    row = json.loads(lines[0])
    path.write_text("".join([json.dumps({**row, "key": ["rl", 7, 0]}) + "\n", *lines]))


def beyond_the_vocabulary(path: Path) -> None:
    lines = lines_of(path)
    row = json.loads(lines[2])
    row["turns"][0]["ids"] = "////fw" + row["turns"][0]["ids"][6:]
    path.write_text("".join([*lines[:2], json.dumps(row) + "\n", *lines[3:]]))


def better_reward(path: Path) -> None:
    lines = lines_of(path)
    path.write_text("".join([*lines[:2], json.dumps({**json.loads(lines[2]), "reward": 9.0}) + "\n", *lines[3:]]))


@pytest.mark.parametrize("damage", [one_missing, one_foreign, beyond_the_vocabulary, better_reward])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_changed_journal_is_not_learnt_from(damage: Callable[[Path], None], compressed: bool, step: Step) -> None:
    first = step.run(half_right)
    path = journal_path(step.folder, 1)
    damage(path)
    if compressed:
        tidy(step.folder, 1, None, needed_after=0)
    with pytest.warns(LemmaWarning, match=r"step-000001\.jsonl .*; step 1 is sampled again"):
        again = step.run(half_right)
    assert not again.from_journal and numbers(again) == numbers(first)
    assert step.run(Silent()).from_journal


def test_the_journal_of_another_step_is_not_taken_for_this_one(step: Step) -> None:
    step.run(half_right, 1)
    shutil.copy(journal_path(step.folder, 1), journal_path(step.folder, 2))
    with pytest.warns(LemmaWarning, match="holds samples of another step; step 2 is sampled again"):
        assert not step.run(half_right, 2).from_journal


def test_a_torn_compressed_journal_is_one_sentence(step: Step) -> None:
    step.run(half_right)
    tidy(step.folder, 1, None, needed_after=0)
    path = journal_path(step.folder, 1).with_name("step-000001.jsonl.gz")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match="this compressed journal is damaged"):
        list(read_episodes(path))


def test_a_stage_keeps_as_many_journals_as_it_is_told(tmp_path: Path) -> None:
    world = toy.Toy(tmp_path)
    changes = {"steps": 6, "journal": {"keep": 2}, "checkpoint": {"every": 1, "keep": 1}}
    world.train(toy.reinforcement(tmp_path, "grpo", **changes))
    journals = sorted((world.run / "stages/toy/journal").iterdir())
    assert [path.name for path in journals] == ["step-000005.jsonl.gz", "step-000006.jsonl.gz"]
    with gzip.open(journals[0], "rt") as file:
        assert len(list(file)) > 8


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 1000}, "samples of all steps stay, at most 13.3 MB a step, 13.3 GB in all"),
        ({"steps": 1000, "journal": {"keep": 50}}, "the newest 50 steps stay, at most 13.3 MB a step, 666 MB in all"),
        (
            {"epochs": 2, "steps": None, "journal": {"notes": False}},
            "samples of all steps stay, at most 9.22 MB a step",
        ),
        ({"rollout": {}}, "samples of all steps stay, about 13 bytes a token, 1024 samples a step"),
    ],
)
def test_the_plan_counts_the_journal(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    whole = {"batch": {"problems": 128}, "rollout": {"max_tokens": 1000}} | changes
    stage = toy.reinforcement(tmp_path, {"name": "grpo", "group_size": 8}, **whole)
    recipe = toy.Toy(tmp_path).recipe({key: value for key, value in stage.items() if value is not None})
    assert f"  journal      {sentence}\n" in describe(recipe)
