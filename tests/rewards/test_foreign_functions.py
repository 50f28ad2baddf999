"""Functions written for veRL and OpenRLHF, as rewards of a recipe."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.rewards import RewardInput, combine, make_reward
from lemma.rewards.failures import RewardFailed

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


ASYNC = """
import asyncio

LIMIT = asyncio.Semaphore(1)

async def one(text):
    async with LIMIT:
        await asyncio.sleep(0.001)
        return float(len(text))

async def for_trl(completions, **columns):
    return await asyncio.gather(*[one(text) for text in completions])

async def for_verl(solution_str, ground_truth):
    return (await asyncio.gather(one(solution_str), one(ground_truth)))[0]

async def for_openrlhf(queries, prompts, labels):
    return await asyncio.gather(*[one(query[len(prompt):]) for query, prompt in zip(queries, prompts)])

async def nested(completions, **columns):
    from lemma.core.async_calls import result_of
    return [result_of(one(text)) for text in completions]

async def hangs(completions, **columns):
    await asyncio.sleep(600)

async def gives_up(completions, **columns):
    raise SystemExit(3)

async def cancelled(completions, **columns):
    raise asyncio.CancelledError
"""


@pytest.fixture
def async_file(tmp_path: Path) -> str:
    (tmp_path / "awaiting.py").write_text(ASYNC)
    return str(tmp_path / "awaiting.py")


@pytest.mark.parametrize("name", ["trl", "verl", "openrlhf"])
def test_async_functions_share_one_event_loop(async_file: str, name: str) -> None:
    """A semaphore or a client of the module belongs to the loop on which it was first used."""
    spec = {name: f"{async_file}:for_{name}"}
    assert scores(spec) == scores(spec) == [1.0, 2.0]


def test_async_functions_inside_a_running_loop(async_file: str) -> None:
    async def notebook() -> list[float | None]:
        return scores({"trl": f"{async_file}:for_trl"})

    assert asyncio.run(notebook()) == [1.0, 2.0]


def test_async_functions_that_fail_are_named(async_file: str) -> None:
    with pytest.raises(RewardFailed, match=r"'gives_up' failed with RuntimeError: SystemExit: 3"):
        scores({"trl": f"{async_file}:gives_up"})
    with pytest.raises(RewardFailed, match=r"'cancelled' failed with CancelledError"):
        scores({"trl": f"{async_file}:cancelled"})
    with pytest.raises(RewardFailed, match=r"'nested' failed with RuntimeError: .* cannot wait for itself: await it"):
        scores({"trl": f"{async_file}:nested"})
    began = time.monotonic()
    with pytest.raises(UserError, match=r"'hangs' took longer than 0.1 s on each of 2"):
        scores({"name": "trl", "function": f"{async_file}:hangs", "seconds": 0.1})
    assert time.monotonic() - began < 20
    assert scores({"trl": f"{async_file}:for_trl"}) == [1.0, 2.0]


EACH = """
import asyncio

TOGETHER = asyncio.Event()
SEEN = []

async def meet(text):
    SEEN.append(text)
    if len(SEEN) == 2:
        TOGETHER.set()
    await TOGETHER.wait()  # for ever, unless both are scored at the same time
    return float(len(text))

async def own(item):
    return await meet(item.completion)

async def theirs(solution_str, ground_truth):
    return {"score": await meet(solution_str)}

async def fails(item):
    if item.completion == "55":
        raise ValueError("no such judge")
    await asyncio.sleep(600)

async def words(item):
    return "good"

async def hangs(item):
    await asyncio.sleep(0 if item.completion == "4" else 600)
    return 1.0

def later(item):
    return asyncio.sleep(0, 0.25)

def late(item):
    return asyncio.sleep(5)

async def late_for_trl(completions, **columns):
    await asyncio.sleep(5)

async def late_for_openrlhf(queries, prompts, labels):
    await asyncio.sleep(5)
"""


@pytest.fixture
def each_file(tmp_path: Path) -> str:
    (tmp_path / "each.py").write_text(EACH)
    return str(tmp_path / "each.py")


@pytest.mark.parametrize("name", ["own", "theirs"])
def test_async_functions_of_one_completion_run_concurrently(each_file: str, name: str) -> None:
    assert scores({"name": f"{each_file}:{name}", "seconds": 20}) == [1.0, 2.0]


CLASSES = """
from lemma.rewards import Reward
from each import asyncio, fails, hangs, meet

class Own(Reward):
    times: float = 1.0

    async def score(self, item):
        return self.times * await meet(item.completion)

class Batch(Reward):
    async def score_all(self, items):
        return await asyncio.gather(*[meet(item.completion) for item in items])

class Wrapped(Reward):
    def score(self, item):
        return asyncio.sleep(0, 0.25)

class Fails(Reward):
    async def score(self, item):
        return await fails(item)

class Hangs(Reward):
    @property
    def seconds_each(self):
        return 0.2

    async def score(self, item):
        return await hangs(item)

class Late(Reward):
    @property
    def seconds_each(self):
        return 0.1

    async def score_all(self, items):
        await asyncio.sleep(600)

class WrappedLate(Late):
    score_all = Reward.score_all

    def score(self, item):
        return asyncio.sleep(5)
"""


@pytest.fixture
def class_file(each_file: str, monkeypatch: pytest.MonkeyPatch) -> str:
    path = Path(each_file).with_name("classes.py")
    path.write_text(CLASSES)
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.delitem(sys.modules, "each", raising=False)
    return str(path)


def test_async_classes_are_awaited(class_file: str) -> None:
    assert scores({"name": f"{class_file}:Own", "times": 2.0}) == [2.0, 4.0], "and concurrently"
    assert scores(f"{class_file}:Batch") == [1.0, 2.0]
    assert scores(f"{class_file}:Wrapped") == [0.25, 0.25]


def test_async_classes_that_fail_are_named(class_file: str) -> None:
    with pytest.raises(RewardFailed, match=r"each.py:\d+: reward 'Fails' failed with ValueError: no such .*'55'"):
        scores(f"{class_file}:Fails")
    with pytest.raises(UserError, match=r"'Hangs' took longer than 0.2 s on the completion '55'"):
        scores(f"{class_file}:Hangs")
    with pytest.raises(UserError, match=r"'Late' took longer than 0.1 s on each of 2 completions"):
        scores(f"{class_file}:Late")


def test_what_is_awaited_has_a_limit_in_other_threads_too(class_file: str, each_file: str) -> None:
    """Steps may be sampled ahead of the learner in a thread, which no signal interrupts."""
    with ThreadPoolExecutor(1) as thread:
        for reward in (
            f"{class_file}:WrappedLate",
            f"{class_file}:Late",
            {"name": f"{each_file}:late", "seconds": 0.1},
            {"name": "trl", "function": f"{each_file}:late_for_trl", "seconds": 0.1},
            {"name": "openrlhf", "function": f"{each_file}:late_for_openrlhf", "seconds": 0.1},
        ):
            with pytest.raises(UserError, match=r"took longer than 0.1 s on"):
                thread.submit(scores, reward).result()


def test_a_plain_function_that_returns_an_awaitable(each_file: str) -> None:
    assert scores(f"{each_file}:later") == [0.25, 0.25]


def test_async_functions_name_the_completion_at_fault(each_file: str) -> None:
    with pytest.raises(RewardFailed, match=r"each.py:\d+: reward 'fails' failed with ValueError: no such .*'55'"):
        scores(f"{each_file}:fails")
    with pytest.raises(RewardFailed, match=r"reward 'words' returned 'good', which is not a finite number"):
        scores(f"{each_file}:words")
    with pytest.raises(UserError, match=r"'hangs' took longer than 0.2 s on the completion '55'; make it end"):
        scores({"name": f"{each_file}:hangs", "seconds": 0.2})


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
