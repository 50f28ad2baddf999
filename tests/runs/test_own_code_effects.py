"""What code of the user's own does to the process that trains, and what it leaves behind when the run ends."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml

from lemma.config.registry import forget_files, load_place
from lemma.core.errors import Interruption, UserError
from lemma.core.types import Message, Problem
from lemma.environments import CustomWorld
from lemma.environments.env_handle import EnvFailure
from lemma.reports.run_table import row_of
from lemma.rewards import Reward, RewardInput, combine, make_reward
from tests import preloaded
from tests.environments.trouble import Worlds

CHANGES = "os.chdir('/'); torch.set_grad_enabled(False); torch.set_default_dtype(torch.float64)"
OWN = f"""\
import os, torch
from lemma.core.errors import Interruption
from lemma.environments import Outcome, Observation

class Gone(BaseException):
    pass

class Silent(Exception):
    def __str__(self):
        raise Gone

def changes(item):
    {CHANGES}
    return 1.0

def changes_all(completions, **columns):
    {CHANGES}
    return [1.0] * len(completions)

async def changes_later(item):
    {CHANGES}
    return 1.0

def raises(item):
    {CHANGES}
    raise Gone("away")

def raises_all(completions, **columns):
    raise Gone("away")

async def raises_later(item):
    raise Gone("away")

def silent(item):
    raise Silent

def is_stopped(item):
    raise Interruption

class World:
    def reset(self, problem, seed):
        {CHANGES}
        return []

    def step(self, said):
        {CHANGES}
        raise Gone("away")

    def score(self):
        return Outcome(1.0)

    def close(self):
        {CHANGES}
        raise Gone("away")

    @staticmethod
    def problems(split):
        {CHANGES}
        raise Gone("away")
"""
PROBLEM = Problem((Message("user", "?"),))
ITEMS = [RewardInput(word, PROBLEM) for word in ("yes", "no")]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of own code; the process is put back where it was, whatever a test finds."""
    monkeypatch.chdir(tmp_path)
    forget_files()
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def reward(file: Path, name: str) -> Reward:
    return make_reward({"name": "trl" if name.endswith("all") else "custom", "function": f"{file}:{name}"})


def check_unchanged(folder: Path) -> None:
    found = Path.cwd(), torch.is_grad_enabled(), torch.get_default_dtype()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    assert found == (folder, True, torch.float32)


@pytest.mark.parametrize("name", ["changes", "changes_all", "changes_later"])
def test_the_working_folder_and_the_modes_of_torch_are_those_before_the_call(name: str, file: Path) -> None:
    assert [score.total for score in combine([reward(file, name)], ITEMS)] == [1.0, 1.0]
    check_unchanged(file.parent)


@pytest.mark.parametrize("name", ["raises", "raises_all", "raises_later"])
def test_an_exception_of_any_kind_is_one_sentence_that_names_the_reward(name: str, file: Path) -> None:
    with pytest.raises(
        UserError, match=rf"mine.py:\d+: reward '{name}' failed with Gone: away on the completion 'yes'"
    ):
        combine([reward(file, name)], ITEMS)
    check_unchanged(file.parent)


def test_an_exception_that_raises_another_one_when_it_is_read_is_a_sentence(file: Path) -> None:
    with pytest.raises(UserError, match=r"reward 'silent' failed with Silent: \(and Gone when it was asked why\)"):
        combine([reward(file, "silent")], ITEMS)


def test_what_a_signal_raises_meanwhile_is_no_fault_of_the_reward(file: Path) -> None:
    with pytest.raises(Interruption):
        combine([reward(file, "is_stopped")], ITEMS)


def test_an_import_changes_nothing_either(file: Path) -> None:
    file.write_text(f"import os, torch\n{CHANGES}\nfound = 1\n")
    assert load_place(f"{file}:found") == 1
    check_unchanged(file.parent)
    file.with_name("other.py").write_text("class Gone(BaseException): ...\nraise Gone('away')\n")
    with pytest.raises(UserError, match=r"other.py:2: this file cannot be imported: Gone: away"):
        load_place(f"{file.with_name('other.py')}:found")


def test_an_environment_in_the_process_that_trains_changes_nothing_and_its_exceptions_are_told(file: Path) -> None:
    options = CustomWorld.model_validate({"class": f"{file}:World", "workers": 0})
    worlds = Worlds(options)
    held = worlds.opened(PROBLEM, seed=0)
    assert worlds.wait(held) == [()]
    check_unchanged(file.parent)
    worlds.say(held, "yes")
    (failure,) = worlds.wait(held)
    assert isinstance(failure, EnvFailure) and "Gone: away" in failure.reason
    check_unchanged(file.parent)
    with pytest.raises(UserError, match=r"mine.py:\d+: `problems` of the environment World failed with Gone: away"):
        options.problems("train")
    check_unchanged(file.parent)


# --- a whole command -------------------------------------------------------------------------------------------------

RUN = """\
import multiprocessing, os, pathlib, signal, subprocess, sys, time
HERE = pathlib.Path(__file__).parent

def branches(item):
    os.chdir("/")
    if not (HERE / "children").exists():
        beside = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        beside.start()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (HERE / "children").write_text(f"{beside.pid} {child.pid}")
    if os.fork() == 0:
        return 0.0
    os.wait4(-1, os.WNOHANG)
    return float(len(item.ids) % 2)

def leaves(item):
    os._exit(0)

def stay():
    with open(HERE / "children", "a") as file:
        words = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(words, stdout=-3, stderr=-3, start_new_session=True)
        file.write(f" {child.pid}")

def interrupts(item):
    stay()
    if "train" in sys.argv:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    return 1.0

class World:
    def __init__(self):
        stay()

    def reset(self, problem, seed):
        return []

    def step(self, said):
        from lemma.environments import Observation
        return Observation("", done=True)

    def score(self):
        from lemma.environments import Outcome
        return Outcome(1.0, True)

    def close(self):
        pass
"""


def start(folder: Path, name: str, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(RUN)
    tiny = {"hidden": 16, "layers": 1, "feed_forward": 16, "heads": 2, "kv_heads": 1}
    stage = {
        "kind": "rl",
        "steps": 2,
        "data": {"arithmetic": {"count": 4, "operations": 1}},
        "algorithm": {"name": "grpo", "group_size": 2},
        "rollout": {"max_tokens": 3},
        "batch": {"problems": 2},
        "rewards": [f"{folder}/mine.py:{name}"],
    }
    recipe = {
        "run": {"dir": "run", "device": "cpu", "threads": 1, "tensorboard": False},
        "model": {"path": "tiny", "tiny": tiny},
        "stages": {"rl": stage},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return preloaded.run(["-m", "lemma", *(command or ("train", "recipe.yaml"))], cwd=folder, timeout=300)


def check_ended(folder: Path) -> None:
    for pid in map(int, (folder / "children").read_text().split()):
        until = time.monotonic() + 10
        while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
            assert time.monotonic() < until, "it outlived the run"
            time.sleep(0.05)


@pytest.mark.slow(10)
def test_a_fork_that_comes_back_is_ended_and_no_child_outlives_the_run(tmp_path: Path) -> None:
    done = start(tmp_path, "branches")
    assert done.returncode == 0, done.stderr
    assert "was forked by code of your own, came back into the run and is ended" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["axis"] == "train"] == [1, 2]
    check_ended(tmp_path)


@pytest.mark.slow(20)
@pytest.mark.parametrize(
    "command",
    [
        ["train", "recipe.yaml"],
        ["debug", "tiny", "--recipe", "recipe.yaml", "--groups", "1", "--max-tokens", "2"],
        ["eval", "tiny", "--environment", "mine.py:World", "--benchmarks", "rows.jsonl", "--max-tokens", "2"],
    ],
    ids=lambda words: words[0],
)
def test_what_own_code_started_ends_with_any_command_that_runs_it(command: list[str], tmp_path: Path) -> None:
    """`train` is stopped by two signals like Ctrl-C."""
    (tmp_path / "rows.jsonl").write_text('{"question": "how many ?", "answer": "7"}\n')
    done = start(tmp_path, "interrupts", *command)
    assert done.returncode == (130 if command[0] == "train" else 0), done.stderr
    check_ended(tmp_path)


@pytest.mark.slow(8)
def test_an_exit_in_the_middle_does_not_pass_for_the_end_of_the_run(tmp_path: Path) -> None:
    done = start(tmp_path, "leaves")
    assert done.returncode == 2
    assert "mine.py:17: os._exit(0) ends the run before it is finished; raise an exception instead" in done.stderr
    assert row_of(tmp_path / "run").state in ("dead", "new")
    assert os.listdir(tmp_path / "run" / "stages" / "rl")


def test_an_exit_while_a_file_is_imported_does_not_pass_for_the_end_either(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import os\nos._exit(0)\n")
    code = "from lemma.config.registry import load_place\nload_place('leaves.py:f')"
    done = preloaded.run(["-c", code], cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "leaves.py:2: os._exit(0) ends the run before it is finished" in done.stderr
