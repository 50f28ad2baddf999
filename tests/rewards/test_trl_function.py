"""Functions written for TRL, as rewards of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.formats import make_format
from lemma.rewards import RewardInput, combine, make_reward
from lemma.rewards.failures import RewardFailed

FUNCTIONS = '''
import re

def format_reward(completions, **kwargs):
    """As in TRL's documentation, for conversations."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content) else 0.0 for content in contents]

def exact(prompts, completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]

def longest(completions, completion_ids, bonus=0.0):
    return [bonus + len(ids) for ids in completion_ids]

async def later(completions, difficulty, **kwargs):
    return [None if one is None else one for one in difficulty]

def broken(completions, **kwargs):
    return [1.0]

def silent(completions, **kwargs):
    pass

def of_one_input(item):
    return 1.0

def lacking(completions, gold_patch):
    return [0.0] * len(completions)
'''


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "trl_rewards.py").write_text(FUNCTIONS)
    return str(tmp_path / "trl_rewards.py")


def items(*rows: dict[str, object], fmt: str = "question_only") -> list[RewardInput]:
    problems = [Problem((Message("user", "2+2?"),), ("4",), extra={"row": row} if row else {}) for row in rows]
    said = ["4", "<think>so</think>5"]
    return [
        RewardInput(text, problem, ids=[1, 2], format=make_format(fmt))
        for text, problem in zip(said, problems, strict=True)
    ]


def scores(spec: dict[str, object], *rows: dict[str, object], fmt: str = "question_only") -> list[float | None]:
    return [one.total for one in combine([make_reward(spec)], items(*rows, fmt=fmt))]


def test_functions_get_texts_messages_columns_and_options(functions: str) -> None:
    assert scores({"trl": f"{functions}:exact"}, {"answer": "4"}, {"answer": "6"}) == [1.0, 0.0]
    assert scores({"trl": f"{functions}:exact"}, {}, {}) == [1.0, 0.0]  # a problem's gold stands for the column
    assert scores({"trl": f"{functions}:format_reward"}, {}, {}, fmt="own") == [0.0, 1.0]
    forced = {"name": "trl", "function": f"{functions}:format_reward", "completions": "messages"}
    assert scores(forced, {}, {}) == [0.0, 1.0]
    assert scores({"trl": f"{functions}:longest", "options": {"bonus": 0.5}}, {}, {}) == [2.5, 2.5]
    assert scores({"trl": f"{functions}:later"}, {"difficulty": 3}, {}) == [3.0, None]


def test_completions_are_messages_where_the_data_has_conversations(functions: str) -> None:
    """As TRL decides it: by the column `prompt`, whatever the format."""
    spec, talk = {"trl": f"{functions}:format_reward"}, {"prompt": [{"role": "user", "content": "2+2?"}]}
    assert scores(spec, talk, talk, fmt="r1_zero") == [0.0, 1.0]
    text = {"prompt": "2+2?", "answer": "4"}
    assert scores({"trl": f"{functions}:exact"}, text, text, fmt="chat") == [1.0, 0.0]


def test_what_is_wrong_with_a_function_is_said(functions: str) -> None:
    with pytest.raises(RewardFailed, match=r"'broken' returned 1 value for 2 completions.* return a list of 2 numbers"):
        scores({"trl": f"{functions}:broken"}, {}, {})
    with pytest.raises(RewardFailed, match=r"'silent' returned None for 2 completions"):
        scores({"trl": f"{functions}:silent"}, {}, {})
    with pytest.raises(UserError, match=r"takes neither prompts nor completions.* without `trl:`"):
        make_reward({"trl": f"{functions}:of_one_input"}).check()
    with pytest.raises(UserError, match=r"asks for 'gold_patch', which no column is called .*data.columns"):
        scores({"trl": f"{functions}:lacking"}, {}, {})
    with pytest.raises(UserError, match=r"there is no|no function|is not"):
        make_reward({"trl": f"{functions}:absent"}).check()


def test_it_is_what_trl_would_compute(functions: str) -> None:
    """TRL calls a function with prompts, completions, ids and columns by keyword; the same call gives the same."""
    import runpy

    function = runpy.run_path(functions)["exact"]
    theirs = function(
        prompts=["2+2?"] * 2, completions=["4", "<think>so</think>5"], answer=["4", "5"], completion_ids=[]
    )
    assert scores({"trl": f"{functions}:exact"}, {"answer": "4"}, {"answer": "5"}) == theirs
