"""Functions written for veRL and OpenRLHF, as rewards of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.rewards import RewardInput, combine, make_reward
from lemma.rewards.combine import RewardFailed

FUNCTIONS = """
import torch

largest = max

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    right = data_source == "gsm8k" and solution_str == ground_truth and extra_info["index"] == 7
    return {"score": float(right) + bonus, "acc": right}

def short(solution_str, ground_truth):
    return solution_str == ground_truth

async def later(solution_str, ground_truth):
    return {"score": solution_str == ground_truth}

async def later_too(queries, prompts, labels):
    return [1.0 for query in queries]

def reward_func(queries, prompts, labels):
    said = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return {"rewards": torch.tensor([float(a == b) for a, b in zip(said, labels)]), "extra_logs": {}}

def plain(queries, prompts, labels, **more):
    return [len(query) for query in queries]

def fewer(queries, prompts, labels):
    return {"rewards": [1.0]}

def unscored(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}

def strange(solution_str, ground_truth, threshold):
    return threshold
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "theirs.py").write_text(FUNCTIONS)
    return str(tmp_path / "theirs.py")


def scores(spec: Any) -> list[float | None]:
    problem = Problem((Message("user", "2+2?"),), ("4",), source="gsm8k", extra={"extra_info": {"index": 7}})
    reward = make_reward(spec)
    reward.check()
    return [row.total for row in combine([reward], [RewardInput("4", problem), RewardInput("55", problem)])]


def test_functions_for_verl(file: str) -> None:
    assert scores(f"{file}:compute_score") == [1.0, 0.0]
    assert scores({"name": f"{file}:compute_score", "options": {"bonus": 0.5}, "weight": 2.0}) == [3.0, 1.0]
    assert scores({"verl": f"{file}:short"}) == scores(f"{file}:short") == [1.0, 0.0]


def test_functions_for_openrlhf(file: str) -> None:
    assert scores(f"{file}:reward_func") == [1.0, 0.0]
    assert scores({"openrlhf": f"{file}:plain", "weight": 0.5}) == [2.5, 3.0]


def test_functions_that_wait(file: str) -> None:
    assert scores(f"{file}:later") == [1.0, 0.0]
    assert scores(f"{file}:later_too") == [1.0, 1.0]


@pytest.mark.parametrize("name", ["trl", "verl", "openrlhf"])
def test_functions_that_do_not_say_what_they_take(file: str, name: str) -> None:
    with pytest.raises(UserError, match=r"'largest' (takes neither|cannot be called)"):
        make_reward({name: f"{file}:largest"}).check()


def test_what_is_wrong_with_them_is_said(file: str) -> None:
    with pytest.raises(RewardFailed, match=r"'fewer' returned 1 value for 2 completions"):
        scores(f"{file}:fewer")
    with pytest.raises(RewardFailed, match=r"'unscored' returned a mapping without 'score' .* mapping with 'score'"):
        scores(f"{file}:unscored")
    with pytest.raises(UserError, match=r"'strange' cannot be called with .*'threshold'; give what it lacks under"):
        scores(f"{file}:strange")
