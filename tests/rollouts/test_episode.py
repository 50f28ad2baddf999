"""Episodes: what of them is learnt from, how often they count, and how they are kept."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.core.types import Group, Problem
from lemma.objectives import Totals
from lemma.rollouts import Episode, Journal, Turn, read_episodes


def turn(context: list[int], ids: list[int], *, extends: bool, **more: Any) -> Turn:
    logprobs = -0.1 * np.arange(1, len(ids) + 1, dtype=np.float32)
    values = (np.array(context, dtype=np.int32), np.array(ids, dtype=np.int32), logprobs, 0 * logprobs, "stop")
    return Turn(*values, extends=extends, **more)


def episode(*turns: Turn, sample: int = 0) -> Episode:
    return Episode(("rl", 1, 0), sample, "p", list(turns), reward=1.0, rewards={"environment": 1.0})


def test_turns_that_extend_each_other_are_one_trajectory() -> None:
    one = episode(turn([1, 2], [3, 4], extends=False), turn([5, 6, 7], [8], extends=True), turn([9], [3], extends=True))
    (trajectory,) = one.trajectories(with_turns=True)
    assert trajectory.ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 3]
    assert trajectory.loss_mask_T.tolist() == [False, False, True, True, False, False, False, True, False, True]
    said = trajectory.token_fields["sampler_logprobs"][trajectory.loss_mask_T]
    assert said == pytest.approx([-0.1, -0.2, -0.1, -0.1])
    assert trajectory.token_fields["turn"][trajectory.loss_mask_T].tolist() == [0, 0, 1, 2]
    assert one.context(2).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (one.tokens, one.ids.tolist(), one.prompt.tolist()) == (4, [3, 4, 8, 3], [1, 2])


def test_a_rewritten_history_gives_several_that_count_once() -> None:
    one = episode(
        turn([1, 2], [3], extends=False), turn([1, 9, 9], [4, 5], extends=False), turn([6], [7], extends=True)
    )
    found = one.trajectories()
    assert [t.ids_T.tolist() for t in found] == [[1, 2, 3], [1, 9, 9, 4, 5, 6, 7]]
    for trajectory in found:
        trajectory.episode = 0
    other = episode(turn([1, 2], [8], extends=False), sample=1).trajectories()
    group = Group(Problem((), id="p"), [*found, *other])
    assert [len(own) for own in group.episodes] == [2, 1]
    totals = Totals.of(group.trajectories)
    assert (totals.tokens, totals.sequences) == (5.0, 2.0)


def test_a_journal_keeps_every_turn(tmp_path: Path) -> None:
    one = episode(
        turn([1, 2], [3, 4], extends=False, heard="higher", text="3"),
        turn([5], [8], extends=True, text="8", reward=0.5, versions=((0, 3), (1, 4))),
    )
    book = Journal(tmp_path / "step-000001.jsonl")
    book.append(one)
    book.finish(drawn=7)
    book.close()
    (read,) = read_episodes(book.path)
    assert repr(read) == repr(one)
    assert json.loads(book.path.read_text().splitlines()[-1])["drawn"] == 7


def test_a_row_of_the_first_version_is_an_episode_of_one_turn(tmp_path: Path) -> None:
    def written(values: list[float], kind: type) -> str:
        return base64.b64encode(np.array(values, dtype=kind).tobytes()).decode()

    row = {
        "version": 1, "key": ["rl", 1, 0], "sample": 2, "problem_id": "p", "prompt": written([1, 2], np.int32),
        "ids": written([3, 4], np.int32), "logprobs": written([-1, -2], np.float32),
        "kept": written([0, 0], np.float32), "finish": "stop", "policy_version": 5, "given": 1, "text": "x",
        "reasoning": None, "answer": "4", "faults": [], "format_ok": True, "verdict": "right", "reason": "value",
        "rewards": {"accuracy": 1.0}, "reward": 1.0, "timings": {"seconds": 0.5},
    }  # fmt: skip
    (tmp_path / "old.jsonl").write_text(json.dumps(row) + "\n")
    (read,) = read_episodes(tmp_path / "old.jsonl")
    assert (read.prompt.tolist(), read.ids.tolist(), read.given, read.verdict) == ([1, 2], [3, 4], 1, "right")
    assert (read.turns[0].versions, read.seconds, read.text) == (((0, 5),), 0.5, "x")
