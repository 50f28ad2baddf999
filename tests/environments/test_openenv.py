"""OpenEnv by its wire: its own server, started from its own virtual environment."""

from __future__ import annotations

import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Problem
from lemma.environments import Action as Said
from lemma.environments import OpenEnv, WorldGone
from lemma.environments.openings import opened_all
from lemma.environments.trial import try_out
from lemma.plugins.openenv import WebSocket, with_field
from lemma.recipe import Recipe
from lemma.rollouts import read_episodes
from lemma.runs.run import train

VENV = Path(sys.prefix) / "openenv"
VERSION = "0.10.0"
REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "openenv.txt"
INSTALL_SECONDS = 240
SESSIONS = 4
SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Told(Observation):
    said: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, low=1, **kwargs):
        if isinstance(low, str):
            raise ValueError(low)
        self.secret, self.turns = low + (seed or 0) % 3, 0
        return Told(said="how many ?", done=False, reward=None)

    def step(self, action):
        self.turns += 1
        if action.message == "break":
            raise RuntimeError("broken on purpose")
        if action.message == "long":
            return Told(said="x" * 200_000, done=False, reward=0.0)
        right = action.message.strip() == str(self.secret)
        return Told(said="right" if right else "wrong é 𝔘", done=right, reward=float(right))

    @property
    def state(self):
        return State(step_count=self.turns)


app = create_fastapi_app(Game, Guess, Told, max_concurrent_envs=MOST)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
""".replace("MOST", str(SESSIONS))


def install() -> str:
    """What went wrong, or nothing. The packages of the test's own environment serve where they fit."""
    python, done = str(VENV / "bin" / "python"), VENV / f"openenv-{VERSION}"
    if done.exists():
        return ""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
    commands = [
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)],
        [*pip, "--no-deps", f"openenv=={VERSION}"],
        [*pip, "-r", str(REQUIREMENTS)],
        [python, "-c", "import openenv.core.env_server.http_server"],
    ]
    for number, command in enumerate(commands):
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if run.returncode:
            return run.stderr[-300:]
        if number == 0:
            folder = VENV / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
            (folder / "beside.pth").write_text(sysconfig.get_path("purelib"))
    done.touch()
    return ""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    wrong = install()
    if wrong:
        pytest.skip(f"OpenEnv could not be installed: {wrong}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = tmp_path_factory.mktemp("openenv") / "server.py"
    script.write_text(SERVER)
    process = subprocess.Popen([str(VENV / "bin" / "python"), str(script), str(port)])
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended"
            try:
                WebSocket(f"ws://127.0.0.1:{port}/ws", 5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_an_episode_by_wire(url: str) -> None:
    options = OpenEnv(url=url)
    options.check()
    (problem, *_) = options.problems("train")
    opened = opened_all(options, [problem], 0)[0]
    assert opened.question == "how many ?"
    world = options.make()
    world.reset(problem, 0)
    assert world.score().reward is None
    replies = [world.step(Said(str(number))) for number in range(4)]
    assert [reply.text for reply in replies if not reply.done] == ["wrong é 𝔘"] * 3
    assert sum(reply.done for reply in replies) == 1
    assert len(world.step(Said("long")).text) == 200_000
    world.close()
    right = next(number for number, reply in enumerate(replies) if reply.done)
    again = options.make()
    again.reset(problem, 0)
    assert again.step(Said(str(right))).done and (again.score().reward, again.score().success) == (1.0, True)
    again.close()


def test_what_is_wrong_with_an_action_is_told_and_the_episode_goes_on(url: str) -> None:
    world = OpenEnv(url=url).make()
    world.reset(Problem((), id="p"), 0)
    assert world.step(Said("break")).text == "error: broken on purpose"
    assert world.score().reward is None, "the server's own trouble"
    assert not world.step(Said("long")).done
    world.close()
    wrong = OpenEnv(url=url, action="guess", turns=2)
    world = wrong.make()
    world.reset(Problem((), id="p"), 0)
    assert "message: Field required" in world.step(Said("1")).text
    assert (world.score().reward, world.score().success) == (0.0, False), "no valid action is a failure"
    world.close()
    world = OpenEnv(url=url, reset_data={"low": "bad seed"}).make()
    with pytest.raises(WorldGone, match="bad seed"):
        world.reset(Problem((), id="p"), 0)
    world.close()
    found = {(one.topic, one.level): one.text for one in try_out(wrong, wrong.problems("train")[:1], 0)}
    assert found["step", "BAD"].startswith("every action is refused: ")


def test_fields_of_actions_and_observations_may_be_nested() -> None:
    data = {"type": "call_tool", "arguments": {"loud": True}}
    wanted = {"type": "call_tool", "arguments": {"loud": True, "message": "hi"}}
    assert with_field(data, "arguments.message", "hi") == wanted and data["arguments"] == {"loud": True}
    assert with_field({}, "a.b.c", "x") == {"a": {"b": {"c": "x"}}} and with_field({"a": 1}, "a", "x") == {"a": "x"}
    options = OpenEnv(url="http://h", observation="result.data")
    assert options.shown({"result": {"data": "seen"}, "done": False}) == "seen"
    assert options.shown({"result": {"data": [1]}}) == "[1]" and options.shown({"other": 1}) == "null"


def test_a_full_server_is_one_sentence(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lemma.plugins.openenv.PATIENCE", 0.3)
    worlds = [OpenEnv(url=url).make() for _ in range(SESSIONS + 1)]
    for world in worlds[:-1]:
        world.reset(Problem((), id="p"), 0)
    with pytest.raises(UserError, match=r"takes no further session: .*; start it with a larger max_concurrent_envs"):
        worlds[-1].reset(Problem((), id="p"), 0)
    worlds[0].close()
    monkeypatch.setattr("lemma.plugins.openenv.PATIENCE", 5)
    worlds[-1].reset(Problem((), id="p"), 0)
    for world in worlds[1:]:
        world.close()


def test_an_address_that_nobody_answers_is_refused() -> None:
    with pytest.raises(UserError, match="is no address of an OpenEnv server"):
        OpenEnv(url="localhost:8000").check()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for place in (f"127.0.0.1:{port}", "127.0.0.1:99999", "127.0.0.1:no", "[::1", "a" * 300):
        with pytest.raises(UserError, match="no OpenEnv server answers"):
            OpenEnv(url=f"http://{place}").check()


def test_steps_of_training_on_the_server(url: str, tmp_path: Path) -> None:
    tiny = {"hidden": 32, "layers": 2, "feed_forward": 64, "heads": 2, "kv_heads": 1}
    stage: dict[str, Any] = {
        "kind": "rl", "algorithm": {"name": "grpo", "group_size": 4}, "data": {"source": "environment"},
        "environment": {"name": "openenv", "url": url, "turns": 2, "problems_per_split": 4, "episodes": SESSIONS,
                        "workers": 0},
        "rollout": {"max_tokens": 2}, "batch": {"problems": 2}, "steps": 1, "eval": {"benchmarks": []},
    }  # fmt: skip
    run = {"dir": str(tmp_path / "run"), "threads": 1, "tensorboard": False}
    recipe = {"run": run, "model": {"tiny": tiny}, "format": "r1_zero", "stages": {"rl": stage}}
    assert train(Recipe.model_validate(recipe), sink=lambda event: None) == 0
    episodes = list(read_episodes(tmp_path / "run/stages/rl/journal/step-000001.jsonl"))
    assert len(episodes) == 8 and all(one.verdict in ("right", "wrong") for one in episodes)
    assert {turn.heard for one in episodes for turn in one.turns} <= {"right", "wrong é 𝔘"}
