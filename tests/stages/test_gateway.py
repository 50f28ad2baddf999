"""Agents that ask the model through a gateway: a real stage, real processes, OpenAI's own client."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lemma.core.errors import LemmaWarning
from lemma.recipe import Recipe
from lemma.rollouts import Episode, read_episodes
from lemma.runs.run import train

TINY = {"hidden": 32, "layers": 2, "feed_forward": 64, "heads": 2, "kv_heads": 1}
AGENTS = """
import asyncio
import openai

def talk(problem, base_url, api_key, turns=2):
    "One conversation that grows."
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages, total = [{"role": "user", "content": problem.question}], 0
    for _ in range(turns):
        reply = client.chat.completions.create(model="any", messages=messages).choices[0].message
        messages += [reply, {"role": "user", "content": "how many pens ?"}]
        total += sum(map(ord, reply.content))
    return float(total % 2)

def forget(problem, base_url, api_key, seed):
    "Keeps its last answer only: history is rewritten."
    client = openai.OpenAI(base_url=base_url, api_key="none", default_headers={"X-Session-ID": api_key})
    said = "1"
    for _ in range(3):
        messages = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": said + " pens"}]
        asked = [*messages, {"role": "user", "content": "how many ?"}]
        said = client.chat.completions.create(model="any", messages=asked, max_tokens=2).choices[0].message.content
    return {"reward": len(said) + seed % 3, "success": len(said) % 2 == 0}

async def branch(problem, base_url, api_key):
    "Two helpers at the same time, and a third who goes on from one of several answers."
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)

    async def helper(word):
        messages, total = [{"role": "user", "content": word}], 0
        for _ in range(2):
            stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "ben"}]
            total += len(said)
        return total

    total = sum(await asyncio.gather(helper("pens"), helper("cups")))
    several = await client.completions.create(model="any", prompt="mia has", n=3, max_tokens=3, logprobs=0)
    picked = "mia has" + several.choices[1].text
    await client.completions.create(model="any", prompt=picked + " pens", max_tokens=3)
    return total % 2 == 0

def score(problem, result):
    return {"reward": 1.0 if "2" in result else 0.0}
"""


ODD = """
import json, os, time, urllib.request

def ask(base_url, api_key):
    body = json.dumps({"prompt": "ben has", "max_tokens": 3}).encode()
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(base_url + "/completions", body, headers)))

def odd(problem, base_url, api_key):
    "Each number goes wrong in its own way."
    number = int(problem.gold)
    if number == 1:
        return 1.0
    ask(base_url, api_key)
    if number == 2:
        raise RuntimeError("the agent gives up")
    if number == 3:
        time.sleep(600)
    if number == 4:
        os._exit(3)
    if number == 5:
        return None
    if number == 6:
        for _ in range(9):
            ask(base_url, api_key)
    return 0.25
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "agents.py"
    path.write_text(AGENTS)
    return path


def play(folder: Path, environment: dict[str, Any], **stage: Any) -> Path:
    """Train in an empty folder, and see that no process is left."""
    folder.mkdir(exist_ok=True)
    rows = [{"question": "how many ?", "answer": str(number)} for number in range(1, 9)]
    (folder / "numbers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings: dict[str, Any] = {
        "kind": "rl", "algorithm": {"name": "grpo", "group_size": 4}, "data": {"source": str(folder / "numbers.jsonl")},
        "environment": {"name": "gateway", "workers": 1, **environment}, "rollout": {"max_tokens": 5},
        "batch": {"problems": 4}, "steps": 1, "optim": {"lr": 1e-3}, "eval": {"benchmarks": []},
    }  # fmt: skip
    recipe = Recipe.model_validate({
        "run": {"dir": str(folder / "run"), "threads": 1, "tensorboard": False},
        "model": {"tiny": TINY}, "format": {"name": "r1_zero", "preamble": False}, "stages": {"rl": settings | stage},
    })  # fmt: skip
    assert train(recipe, sink=lambda event: None) == 0
    assert not [one for one in psutil.Process().children(recursive=True) if "agent_worker" in " ".join(one.cmdline())]
    return folder / "run"


def journal(run: Path, step: int = 1) -> list[Episode]:
    return sorted(read_episodes(run / f"stages/rl/journal/step-{step:06}.jsonl"), key=lambda one: one.order)


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["axis"] == "train"]


def said(episodes: list[Episode]) -> list[list[int]]:
    return [turn.ids.tolist() for episode in episodes for turn in episode.turns]


def test_an_agent_trains_for_three_steps(agents: Path, tmp_path: Path) -> None:
    run = play(tmp_path / "one", {"agent": f"{agents}:talk", "workers": 2}, steps=3)
    found = rows(run)
    assert [row["updates"] > 0 for row in found] == [True] * 3
    assert all(row["mismatch/max"] < 1e-5 and row["turns/mean"] == 2 for row in found)
    episodes = journal(run)
    assert len(episodes) == 16
    for episode in episodes:
        (trajectory,) = episode.trajectories()
        assert trajectory.trained_tokens == episode.tokens and [turn.extends for turn in episode.turns] == [False, True]
        assert episode.turns[0].heard == "how many pens ?"
        # The end of the first turn is there once, sampled or not.
        assert episode.turns[1].context.tolist().count(1) == (episode.turns[0].ids[-1] != 1)
        assert episode.reward == float(sum(ord(letter) for turn in episode.turns for letter in turn.text) % 2)
    again = play(tmp_path / "two", {"agent": f"{agents}:talk", "episodes": 3})
    assert said(journal(again)) == said(episodes), "who else is at work changes nothing"


def test_an_agent_that_rewrites_its_history_gives_several_trajectories(agents: Path, tmp_path: Path) -> None:
    run = play(tmp_path, {"agent": f"{agents}:forget"}, steps=2)
    episodes = journal(run)
    for episode in episodes:
        assert [turn.extends for turn in episode.turns] == [False] * 3 and len(episode.trajectories()) == 3
        assert all(len(turn.ids) <= 2 for turn in episode.turns)
        assert (episode.verdict == "right") == (len(episode.text) % 2 == 0) and episode.reward is not None
    assert len({episode.reward - len(episode.text) for episode in episodes if episode.reward is not None}) > 1
    assert all(row["mismatch/max"] < 1e-5 and row["turns/mean"] == 3 for row in rows(run))


def test_calls_at_the_same_time_and_several_answers(agents: Path, tmp_path: Path) -> None:
    run = play(tmp_path, {"agent": f"{agents}:branch"})
    for episode in journal(run):
        assert len(episode.turns) == 2 + 2 + 3 + 1
        # Two helpers of two turns each, two answers that nobody took up, and one that went on or was cut.
        lengths = sorted(sum(turn.extends for turn in part) + 1 for part in parts(episode))
        assert lengths in ([1, 1, 2, 2, 2], [1, 1, 1, 1, 2, 2])
        assert len(episode.trajectories()) == len(lengths)
    assert rows(run)[0]["mismatch/max"] < 1e-5


def parts(episode: Episode) -> list[list[Any]]:
    found: list[list[Any]] = []
    for turn in episode.turns:
        found += [] if turn.extends else [[]]
        found[-1].append(turn)
    return found


def test_what_goes_wrong_is_unknown_and_never_a_reward(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    world = {"agent": f"{tmp_path / 'odd.py'}:odd", "episode_seconds": 8, "episodes": 4, "turns": 5, "unknown_limit": 1}
    run = play(tmp_path, world, batch={"problems": 8}, algorithm={"name": "grpo", "group_size": 2})
    reasons = {
        1: "never asked the model",
        2: "RuntimeError: the agent gives up",
        3: "ran past its deadline",
        4: "the process of the agent died",
        5: "gave no reward",
        6: "HTTP Error 400",
    }
    episodes = journal(run)
    assert len(episodes) == 16
    for episode in episodes:
        number = int(episode.gold[0])
        if number in reasons:
            assert episode.reward is None and episode.verdict == "unknown" and reasons[number] in episode.reason
        else:
            assert (episode.reward, episode.verdict) == (0.25, "wrong")


COMMAND = """
import json, os, sys, urllib.request
problem = json.load(sys.stdin)
body = json.dumps({"prompt": problem["messages"][0]["content"], "max_tokens": 4}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/completions"
print(json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["text"])
"""


def test_a_command_and_a_function_that_scores(agents: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(COMMAND)
    world = {"command": f"python3 {tmp_path / 'agent.py'}", "score": f"{agents}:score"}
    run = play(tmp_path / "run", world, batch={"problems": 1})
    episodes = journal(run)
    assert len(episodes) == 4
    assert all(episode.reward == float("2" in episode.text) for episode in episodes)


def test_what_the_recipe_decides_an_agent_does_not(agents: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(COMMAND.replace('"max_tokens": 4', '"max_tokens": 4, "temperature": 0'))
    with pytest.warns(LemmaWarning, match="the agent chooses temperature"):
        play(tmp_path / "run", {"command": f"python3 {tmp_path / 'agent.py'}"}, batch={"problems": 1}, **NO_WORD)


# The agent says nothing of its worth: the grader looks at what was said last.
NO_WORD: dict[str, Any] = {"rewards": ["accuracy"]}


HANGING = """
import os, pathlib, subprocess, time

def hang(problem, base_url, api_key, folder):
    child = subprocess.Popen(["sleep", "600"])
    path = pathlib.Path(folder) / f"{child.pid}.new"
    path.write_text(f"{os.getpid()} {os.getppid()} {child.pid}")
    path.rename(path.with_suffix(".pids"))
    time.sleep(600)
"""


TRAINER = """
import sys, time
from lemma.core.types import Message, Problem
from lemma.environments.gateway import Gateway

options = Gateway(agent=sys.argv[1] + "/hang.py:hang", workers=2, options={"folder": sys.argv[1]})
for name in range(3):
    options.pool().begin(name, Problem((Message("user", "?"),)), 0, "http://127.0.0.1:1", "key", 600)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_a_trainer_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(HANGING)
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)]) as trainer:
        while len(list(tmp_path.glob("*.pids"))) < 3:
            assert trainer.poll() is None
            time.sleep(0.05)
        trainer.kill()
    pids = {int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()}
    assert len(pids) == 3 + 2 + 2, "three programs of agents, in two processes with their watchers"
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "processes of agents outlive the trainer"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, "a gateway has one agent"),
        ({"agent": "nowhere.py:solve"}, "there is no file 'nowhere.py'"),
        ({"agent": "AGENTS:solve"}, "there is no 'solve'"),
        ({"agent": "AGENTS:score"}, r"score does not take \(problem, base_url, api_key\)"),
        ({"agent": "AGENTS:talk", "options": {"rounds": 3}}, "rounds"),
        ({"agent": "AGENTS:talk", "schedule": "exact"}, "leave `schedule: exact` out"),
        ({"agent": "AGENTS:talk", "step_seconds": 5}, "step_seconds is for environments that are stepped"),
    ],
)
def test_what_cannot_be_played_is_refused(
    environment: dict[str, Any], sentence: str, agents: Path, tmp_path: Path
) -> None:
    named = {
        name: value.replace("AGENTS", str(agents)) if name == "agent" else value for name, value in environment.items()
    }
    with pytest.raises(Exception, match=sentence):
        play(tmp_path, named)
