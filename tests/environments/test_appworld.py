"""The real AppWorld with tasks of our own: scripted agents, its measures, hostile programs, and two steps of GRPO."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lemma.cli import main
from lemma.core.types import Outcome, Problem
from lemma.environments import Action, AppWorldOptions, Attempt, WorldGone
from lemma.evaluation.results import read_report
from lemma.plugins.appworld import appworld_episode, runner_client
from lemma.plugins.appworld.appworld_episode import AppWorldEpisode
from lemma.recipe import Recipe
from lemma.rollouts import read_episodes
from lemma.runs.run import train
from tests.environments.appworld_hostile import HOSTILE
from tests.environments.appworld_made import Place, appworld_place
from tests.environments.trouble import Worlds

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "small"
LOGIN = "apis.simple_note.login(username='ada.byron@gmail.com', password='poetical-science')['access_token']"


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    found = appworld_place()
    yield found
    runner_client.stop_all()


def tasks(options: AppWorldOptions, split: str = "dev") -> dict[str, Problem]:
    return {problem.id: problem for problem in options.problems(split)}


def play(options: AppWorldOptions, problem: Problem, *codes: str) -> tuple[list[str], Outcome]:
    """What the replies to these programs say, and what the episode was worth."""
    world = options.make()
    try:
        world.reset(problem, 0)
        heard = [world.step(Action(f"So.\n```python\n{code}\n```")).text for code in codes]
        return heard, world.score()
    finally:
        world.close()


def write(title: str, content: str) -> str:
    return f"apis.simple_note.create_note(title={title!r}, content={content!r}, access_token={LOGIN})"


DONE = "apis.supervisor.complete_task({})"


def test_scripted_agents_and_their_measures(place: Place) -> None:
    """One task solved, one in part, one wrong, one given up, one not ended; TGC and SGC as computed by hand."""
    options = place.options()
    dev = tasks(options)
    count = f"token = {LOGIN}\nprint(len(apis.simple_note.search_notes(access_token=token)))"
    heard, solved = play(options, dev["aaaaaa1_1"], count, DONE.format("answer=3"))
    assert heard[0] == "Output:\n```\n3\n```"
    assert (solved.reward, solved.success) == (1.0, True)
    _, given_up = play(options, dev["aaaaaa1_2"], DONE.format("status='fail'"))
    assert (given_up.reward, given_up.success) == (0.0, False) and "gave up" in given_up.reason
    _, written = play(options, dev["bbbbbb2_1"], write("Plan", "rest"), DONE.format(""))
    assert (written.reward, written.success) == (1.0, True)
    _, partly = play(options, dev["bbbbbb2_2"], write("Fish", "ling"), DONE.format(""))
    assert (partly.reward, partly.success) == (2 / 3, False), "2 of the 3 tests that doing nothing does not pass"
    _, unfinished = play(options, dev["cccccc3_1"], "print(1)")
    assert (unfinished.reward, unfinished.success) == (0.0, False) and "not completed" in unfinished.reason

    outcomes = dict(zip(dev, [solved, given_up, written, partly, unfinished], strict=True))
    measures = options.summarise([Attempt(dev[name], 0, 2, one.success) for name, one in outcomes.items()])
    means = {name: sum(values) / len(values) for name, values in measures.items()}
    assert means == {
        "tgc": 2 / 5, "sgc": 0.0, "tgc/difficulty_1": 1 / 2, "sgc/difficulty_1": 0.0, "tgc/difficulty_2": 1 / 2,
        "sgc/difficulty_2": 0.0, "tgc/difficulty_3": 0.0, "sgc/difficulty_3": 0.0,
    }  # fmt: skip


def test_the_agent_with_a_rebuilt_prompt_and_the_reward_for_completion(place: Place) -> None:
    options = place.options(agent="rebuilt", reward="compat", history=1)
    problem = tasks(options)["aaaaaa1_1"]
    assert "This is step 1." in problem.question and "How many notes" in problem.question
    world = options.make()
    world.reset(problem, 0)
    first = world.step(Action("<think>hm</think><code>print(40 + 2)</code>"))
    assert first.text == "42\n" and first.prompt is not None and not first.done
    assert "Code:\nprint(40 + 2)\nOutput:\n42" in first.prompt and "This is step 2." in first.prompt
    silent = world.step(Action("no idea"))
    assert silent.prompt is not None and "No code was found" in silent.prompt and "40 + 2" not in silent.prompt
    assert world.step(Action("<think></think>" + DONE.format("answer=77"))).done
    outcome = world.score()
    world.close()
    assert (outcome.reward, outcome.success) == (10.0, False), "paid for saying so, and still no success"


def test_the_command_that_tries_it(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    given = [part for name, value in place.given().items() for part in ("--set", f"{name}={value}")]
    assert main(["env", "test", "appworld", *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    tasks: dev 5, train 3" and len(lines) == 7
    assert all(line.startswith("ok ") for line in lines)
    assert lines[-1] == "ok    it is judged: 1 of 2 tests passed; gave up; reward 0"


@pytest.fixture
def secret(place: Place, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What hostile programs look for: a file, the gold of a task, a port that somebody listens on."""
    file = tmp_path / "secret.txt"
    file.write_text("THE-SECRET")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.0)
        yield {
            "secret": "THE-SECRET", "file": file, "task": "aaaaaa1_2", "port": listener.getsockname()[1],
            "gold": place.root / "data/tasks/aaaaaa1_2/ground_truth/answer.json", "listener": listener,
            "site": next(place.venv.glob("lib/python*/site-packages")),
        }  # fmt: skip


def attack(options: AppWorldOptions, problem: Problem, codes: dict[str, str]) -> tuple[dict[str, str], Outcome | None]:
    """What the programs printed, one after the other in one world, and its worth; None where the world died."""
    printed: dict[str, str] = {}
    world = options.make()
    world.reset(problem, 0)
    try:
        for name, code in codes.items():
            printed[name] = world.step(Action(f"```python\n{code}\n```")).text
        return printed, world.score()
    except WorldGone as error:
        return {**printed, name: str(error)}, None
    finally:
        world.close()


# These break their world, or what is judged afterwards: each gets one for itself.
APART = {
    "a poisoned database", "a full disk", "no reply", "a false reply", "nonsense as a reply", "leave", "a deaf loop",
    "read what is not there",
}  # fmt: skip
# The system call that makes a set of rules, and says how new it is.
LANDLOCK = 444
REFUSED = ("the gold", "a file", "processes", "fork", "another", "kill", "write", "the network", "the runner")


@pytest.mark.parametrize("sandbox", ["namespaces", "landlock"])
def test_no_hostile_program_gets_out_or_is_paid(
    sandbox: str, place: Place, secret: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if sandbox == "landlock" and ctypes.CDLL(None).syscall(LANDLOCK, None, 0, 1) < 1:
        pytest.skip("needs Landlock in the kernel")
    monkeypatch.setattr(appworld_episode, "GRACE_SECONDS", 2)
    options = place.options(sandbox="auto" if sandbox == "namespaces" else sandbox, turns=len(HOSTILE))
    problem = tasks(options)["aaaaaa1_2"]
    runner_client.begin(options.runner)
    runner = runner_client._runners[options.runner]
    words = {**secret, "server": runner.process.pid, "address": f"\\0{runner.address}"}
    programs = {name: program.format(**words) for name, program in HOSTILE.items()}
    apart = APART if sandbox == "namespaces" else {"a poisoned database", "leave"}
    rounds = [
        {name: programs[name] for name in programs if name not in APART},
        *({name: programs[name]} for name in apart),
    ]
    died: set[str] = set()
    for one in rounds:
        printed, outcome = attack(options, problem, one)
        for name, text in printed.items():
            assert "THE-SECRET" not in text, name
            assert not name.startswith(REFUSED) or "Execution failed" in text, (name, text)
        died |= set(printed) if outcome is None else set()
        assert outcome is None or (outcome.reward == 0.0 and outcome.success is False), (one, outcome)
        assert secret["file"].read_text() == "THE-SECRET" and not (secret["site"] / "evil.py").exists()
    assert died <= APART and "leave" in died, "worlds that die are theirs alone"
    with pytest.raises(BlockingIOError):
        secret["listener"].accept()
    assert runner.is_alive
    _, after = play(options, problem, DONE.format("answer=2"))
    assert after.success, "the run goes on"


def test_a_world_that_dies_twice_by_the_same_action_is_wrong_and_the_others_go_on(place: Place) -> None:
    """Through workers, as a run plays it: two strikes, and a fresh world in between."""
    options = place.options(turns=3)
    dev = tasks(options)
    worlds = Worlds(options)
    try:
        bad, good = worlds.opened(dev["aaaaaa1_1"], 0), worlds.opened(dev["aaaaaa1_2"], 0)
        worlds.wait(bad, good)
        worlds.say(bad, "```python\n__import__('posix')._exit(1)\n```")
        worlds.say(good, f"```python\n{DONE.format('answer=2')}\n```")
        failure, reply = worlds.wait(bad, good)
        assert failure.is_limit and "twice" in failure.reason
        assert reply.done
        worlds.score(good)
        assert worlds.wait(good)[0].success is True
    finally:
        worlds.close()


PLAYER = """
import sys, time
from lemma.environments import AppWorldOptions, Action

options = AppWorldOptions.model_validate_json(sys.argv[1])
problem = options.problems("dev")[0]
world = options.make()
world.reset(problem, 0)
print("playing", flush=True)
world.step(Action("```python\\nwhile True: pass\\n```"))
"""


def test_nothing_is_left_behind(place: Place) -> None:
    """One player is killed, the other interrupted, both while their agents' code runs."""
    options = place.options(code_seconds=60, cpu_seconds=61)
    command = [sys.executable, "-c", PLAYER, options.model_dump_json()]
    ends = (signal.SIGKILL, signal.SIGINT)
    players = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in ends]
    for player, end in zip(players, ends, strict=True):
        assert player.stdout is not None and player.stdout.readline() == b"playing\n"
        assert len(servers(player.pid)) >= 3, "the server, a keeper, a world"
        player.send_signal(end)
        player.wait(90)
        player.stdout.close()
        until = time.monotonic() + 10
        while servers(player.pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert servers(player.pid) == []


def servers(owner: int) -> list[int]:
    """Processes of a runner that this process started: its address is in their command line."""
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdigit():
            try:
                line = (one / "cmdline").read_bytes()
                state = (one / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"lemma-appworld-{owner}-".encode() in line and state != "Z":
                found.append(int(one.name))
    return found


def test_an_episode_type_is_what_the_options_make(place: Place) -> None:
    world = place.options().make()
    assert isinstance(world, AppWorldEpisode)
    with pytest.raises(WorldGone):
        world.score()
    assert os.environ[place.options().runner.variable].startswith(f"lemma-appworld-{os.getpid()}-")


def action_tokens() -> list[str]:
    """Tokens of whole programs, so that a model which knows nothing ends its tasks, and often rightly."""
    program = "```python\napis.supervisor.complete_task(answer={})\n```"
    return [program.format(n) + " " * i for i in range(1, 80) for n in (2, 3)]


def twin(name: str, place: Place, folder: Path) -> Recipe:
    """A small recipe on our own tasks, with a model that can say programs."""
    given = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    given["run"] |= {"dir": str(folder), "tensorboard": False}
    given["model"]["tiny"]["words"] += action_tokens()
    (stage,) = given["stages"].values()
    stage["environment"] |= place.given(turns=2)
    stage["data"] |= {"count": 2}
    stage["rollout"] |= {"max_tokens": 1}
    if name == "appworld_loop":
        stage["algorithm"] |= {"group_size": 4}
    return Recipe.model_validate(given)


@pytest.mark.parametrize("algorithm", ["ppo", "loop", "grpo"])
def test_two_steps_of_the_small_recipes(algorithm: str, place: Place, tmp_path: Path) -> None:
    recipe = twin(f"appworld_{algorithm}", place, tmp_path)
    assert train(recipe, sink=lambda event: None) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["axis"] == "train"] == [1, 2]
    journal = tmp_path / "stages" / algorithm / "journal"
    episodes = [one for step in (1, 2) for one in read_episodes(journal / f"step-00000{step}.jsonl")]
    assert len(episodes) == 2 * 2 * {"ppo": 1, "loop": 4, "grpo": 2}[algorithm]
    for episode in episodes:
        last = episode.turns[-1].text
        gold = {"aaaaaa1_1": "3", "aaaaaa1_2": "2"}[episode.problem_id]
        is_right, is_done = f"complete_task(answer={gold})" in last, "complete_task" in last
        assert episode.verdict == ("right" if is_right else "wrong")
        # Half of the tests pass where nothing was done; PPO's recipe pays for saying that the task is done.
        worth = 10.0 * is_done if algorithm == "ppo" else 1.0 if is_right else 0.5 if is_done else 0.0
        assert episode.rewards["environment"] == pytest.approx(worth)
        whole = [episode.turns] if algorithm == "loop" else episode.turns
        assert len(episode.trajectories()) == len(whole), "a rebuilt prompt makes each turn a trajectory of its own"
    if algorithm == "loop":
        assert len({episode.verdict for episode in episodes}) == 2, "both happen, so there is something to learn"
        assert any(row["updates"] > 0 and row["grad_norm"] > 0 for row in rows if row["axis"] == "train")
        evaluate(place, tmp_path)


def evaluate(place: Place, folder: Path) -> None:
    """The model of a run on the split `dev`, from the command line."""
    (folder / "world.yaml").write_text(json.dumps(place.given(turns=2)))
    given = ["--environment", str(folder / "world.yaml"), "--split", "dev", "--max-tokens", "1", "--temperature", "1"]
    assert main(["eval", str(folder), *given, "--device", "cpu", "--to", str(folder / "out")]) == 0
    rows = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    right = {row["problem"]: row["verdict"] == "right" for row in rows}
    measures = read_report(folder / "out").measures["appworld"]
    assert sorted(measures["tgc"]) == sorted(map(float, right.values())) and len(right) == 5
    assert measures["sgc/difficulty_1"] == [float(right["aaaaaa1_1"] and right["aaaaaa1_2"])]
