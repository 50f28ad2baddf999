"""Ranks that die, stop, fill the disk or make a mistake: the group goes on bit for bit, or ends in one sentence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lemma.core.random import stream
from tests.cluster.forked import LAUNCHER, Forked, ForkedRank, wait_for
from tests.preloaded import Python

RECIPE = """
run: {{dir: {dir}, seed: 3, threads: 1, device: cpu, tensorboard: false}}
model: {{path: tiny, tiny: {{hidden: 32, layers: 2, feed_forward: 48, context: 96}}}}
format: {{name: r1_zero, preamble: false}}
cluster: {{slots: 2, shard: optimiser, patience: {patience}, deadline: {deadline}}}
stages:
  sft:
    steps: 6
    data: {{arithmetic: {{count: 60, operations: 2}}}}
    batch: {{sequences: 6, token_budget: 128}}
    checkpoint: {{every: 2, keep: 2}}
  rl:
    algorithm: {{name: grpo, group_size: 4}}
    steps: {steps}
    data: {{arithmetic: {{count: 40, operations: 2}}}}
    rewards: [{reward}]
    rollout: {{max_tokens: 4}}
    batch: {{problems: 4, token_budget: 256}}
    optim: {{lr: 2e-3}}
    checkpoint: {{every: 2, keep: 2}}
"""
PARITY = f"{Path(__file__).parents[1] / 'algorithms' / 'toy.py'}:parity"
# The number behind @ is the rank that dies; each place is reached in the first steps of either stage.
FAULTS = (
    "checkpoint.mid_write:1@1",
    "checkpoint.before_rename:1@0",
    "rollouts.sampled:3@1",
    "rollouts.before_finish:2@0",
    "rl.before_update:2@1",
    "checkpoint.after_rename:2@0",
    "jsonl.mid_line:4@0",
    "stage.step_end:3@1",
    "rl.mid_update:1@0",
    "stage.before_final_rename:1@0",
)


def prepare(folder: Path, steps: int = 4, patience: float = 20.0, deadline: float = 60.0, reward: str = PARITY) -> Path:
    folder.mkdir(exist_ok=True)
    text = RECIPE.format(dir=folder / "run", steps=steps, patience=patience, deadline=deadline, reward=reward)
    (folder / "recipe.yaml").write_text(text)
    return folder


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Every metric but timings, and every byte of the final models and of the states they were made from."""
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("timings")
        row.pop("held_by", None)
    stages = folder / "run/stages"
    files = [*stages.glob("*/final/*.safetensors"), *stages.glob("*/checkpoints/*/*.safetensors")]
    return rows, {str(path.relative_to(stages)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    folder = prepare(tmp_path_factory.mktemp("undisturbed"))
    launcher = Forked(folder)
    assert launcher.run() == 0, launcher.output
    assert launcher.said == []
    return outcome(folder)


@pytest.mark.parametrize("fault", FAULTS[::3])
def test_a_rank_that_dies_is_started_again(tmp_path: Path, undisturbed: Any, fault: str) -> None:
    launcher = Forked(prepare(tmp_path), fault=fault)
    assert launcher.run() == 0, (launcher.said, launcher.output)
    assert launcher.said == [f"rank {fault[-1]} was killed by SIGKILL; starting the 2 ranks again (1 of 3)"]
    assert outcome(tmp_path) == undisturbed


@pytest.mark.kill
def test_forty_deaths_change_nothing(tmp_path: Path) -> None:
    """At every named place, and at random instants of random ranks."""
    true = prepare(tmp_path / "true", steps=240)
    assert Forked(true).run() == 0
    folder, chance = prepare(tmp_path / "killed", steps=240), stream(5, "kills")
    for fault in FAULTS[:-1]:  # the last one comes after the last step
        assert Forked(folder, fault=fault, restarts=0).run() == 1
    deaths = len(FAULTS) - 1
    while deaths < 40:
        launcher = Forked(folder, restarts=0)
        rows = len((folder / "run/metrics.jsonl").read_bytes().splitlines())
        thread = threading.Thread(target=_kill_later, args=(launcher, folder, rows, chance), daemon=True)
        thread.start()
        deaths += launcher.run() != 0
        assert not (folder / "run/stages/rl/done.json").exists(), f"the run ended after {deaths} deaths"
    assert Forked(folder).run() == 0
    assert outcome(folder) == outcome(true)


def _kill_later(launcher: Forked, folder: Path, rows: int, chance: Any) -> None:
    wait_for(lambda: len((folder / "run/metrics.jsonl").read_bytes().splitlines()) != rows)
    time.sleep(float(chance.random()) * 0.3)
    os.kill(launcher.pid_of(int(chance.integers(2))), signal.SIGKILL)


def test_a_rank_that_stands_still_is_replaced(tmp_path: Path, undisturbed: Any) -> None:
    """Stopped by SIGSTOP, it neither dies nor answers: the others notice that it does not beat."""
    launcher = Forked(prepare(tmp_path, patience=3.0))

    def stop() -> None:
        wait_for(lambda: (tmp_path / "run/stages/sft/checkpoints/step-00000002").exists())
        os.kill(launcher.pid_of(1), signal.SIGSTOP)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    began = time.monotonic()
    assert launcher.run() == 0, launcher.output
    assert time.monotonic() - began < 60
    (sentence,) = launcher.said
    assert "nothing was heard of rank 1 on " in sentence and "last seen at '" in sentence and "for 3 s" in sentence
    assert outcome(tmp_path)[1] == undisturbed[1]


def test_a_full_disk_on_one_rank_ends_all_in_one_sentence(tmp_path: Path, undisturbed: Any) -> None:
    launcher = Forked(prepare(tmp_path), fault="checkpoint.mid_write:2:ENOSPC@1")
    assert launcher.run() == 2
    errors = [line for line in launcher.output.splitlines() if "error" in line] + launcher.said
    assert len(errors) == 1, errors
    assert "a checkpoint could not be written to" in errors[0] and "the one of step 2 is intact" in errors[0]
    assert Forked(tmp_path).run() == 0
    assert outcome(tmp_path) == undisturbed


def test_a_mistake_that_only_one_rank_meets_is_said_once(tmp_path: Path) -> None:
    """A reward that fails on the second rank: the first one says it, and nothing is started again."""
    (tmp_path / "mine.py").write_text(
        "import os\n\n\ndef moody(item):\n    assert os.environ['RANK'] == '0', 'not here'\n    return 1.0\n"
    )
    launcher = Forked(prepare(tmp_path, reward=f"{tmp_path / 'mine.py'}:moody"))
    assert launcher.run() == 2
    errors = [line for line in launcher.output.splitlines() if "error" in line] + launcher.said
    assert len(errors) == 1 and "moody" in errors[0] and "not here" in errors[0], errors
    assert "Traceback" not in launcher.output


def test_a_rank_that_lives_and_does_not_come_is_named(tmp_path: Path) -> None:
    """The second rank thinks about a reward for too long; the first one says where it waited, and for whom."""
    (tmp_path / "mine.py").write_text(
        "import os, time\n\n\ndef slow(item):\n    time.sleep(30 * int(os.environ['RANK']))\n    return 1.0\n"
    )
    launcher = Forked(prepare(tmp_path, deadline=4.0, reward=f"{tmp_path / 'mine.py'}:slow"), restarts=0)
    assert launcher.run() == 1
    (sentence,) = launcher.said
    assert "rank 0 waited at 'the samples of a round', and rank 1 on " in sentence
    assert "last seen at 'generate' did not come" in sentence


def test_a_stop_is_agreed_on(tmp_path: Path, undisturbed: Any) -> None:
    """SIGTERM to one rank is enough: all finish the same step and save it."""
    launcher = Forked(prepare(tmp_path), fault="stage.step_end:3:SIGTERM@1")
    assert launcher.run() == 0, launcher.output
    assert launcher.said == [] and "stopped after saving" in launcher.output
    assert (tmp_path / "run/stages/sft/checkpoints/step-00000004").exists()
    assert not (tmp_path / "run/stages/rl").exists()
    assert Forked(tmp_path).run() == 0
    assert outcome(tmp_path)[1] == undisturbed[1]


def test_ranks_that_make_no_step_are_not_started_for_ever(tmp_path: Path) -> None:
    launcher = Forked(prepare(tmp_path), restarts=1, fault="stage.step_end:1")
    assert launcher.run() == 1
    assert len(launcher.said) == 2 and "1 starts in a row brought no further step" in launcher.said[-1]


def kill_the_launcher(folder: Path) -> None:
    """kill -9 of `lemma train --ranks 2` after its first checkpoints; its ranks end with it."""
    prepare(folder)
    words = ["-c", LAUNCHER, "train", folder / "recipe.yaml", "--ranks", "2"]
    process = Python(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: (folder / "run/stages/sft/checkpoints/step-00000002").exists(), 120)
    children = _children(process.pid)
    assert len(children) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 10)


def test_a_launcher_that_dies_takes_its_ranks_along(tmp_path: Path) -> None:
    kill_the_launcher(tmp_path)


def test_torchrun_goes_on_where_a_launcher_died(tmp_path: Path, undisturbed: Any) -> None:
    """The same command goes on, here with torchrun and its restarts."""
    kill_the_launcher(tmp_path)
    env = os.environ | {"LEMMA_FAULT": "stage.step_end:2@1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*torchrun, *port, "-m", "lemma", "train", str(tmp_path / "recipe.yaml")],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert outcome(tmp_path)[1] == undisturbed[1]


def _children(parent: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_ranks_under_a_foreign_launcher(tmp_path: Path, undisturbed: Any) -> None:
    """The variables that torchrun, accelerate and Slurm scripts set are all that two ranks need to meet; those by which
    accelerate's FSDP has one rank alone read a model's weights do not keep them from the others."""
    prepare(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = os.environ | {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    }
    words = ["train", str(tmp_path / "recipe.yaml")]
    ranks = [
        ForkedRank(words, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, tmp_path / f"output-{rank}.txt")
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0], (tmp_path / "output-0.txt").read_text()[-3000:]
    assert json.loads((tmp_path / "run/run.json").read_text())["slots"] == 2
    assert len(list((tmp_path / "run/stages/sft/checkpoints/step-00000006").glob("tensors-*"))) == 2
    assert outcome(tmp_path)[1] == undisturbed[1]


def test_accelerate_launch(tmp_path: Path, undisturbed: Any) -> None:
    prepare(tmp_path)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--main_process_port", "0"]
    module = ["--dynamo_backend", "no", "-m", "lemma", "train", str(tmp_path / "recipe.yaml")]
    done = subprocess.run([*launch, *module], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run/run.json").read_text())["slots"] == 2
    assert len(list((tmp_path / "run/stages/sft/checkpoints/step-00000006").glob("tensors-*"))) == 2
    assert outcome(tmp_path)[1] == undisturbed[1]
