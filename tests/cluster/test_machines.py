"""Two machines, which are namespaces of this one: the bits of one machine, and one sentence where they do not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lemma.engines.remote.server_guard import KEY_VARIABLE
from tests.cluster.forked import wait_for
from tests.cluster.machines import ADDRESSES, NAMES, PORT, Machine, Pair, missing

WHY_NOT = missing()
machines = pytest.mark.machines
pytestmark = [machines, pytest.mark.skipif(WHY_NOT is not None, reason=f"no machines of one's own: {WHY_NOT}")]
PATIENCE = 2.0
PARITY = f"{Path(__file__).parents[1] / 'algorithms' / 'toy.py'}:parity"
RECIPE: dict[str, Any] = {
    "run": {"seed": 3, "threads": 1, "device": "cpu", "tensorboard": False, "deterministic": True},
    "model": {"path": "tiny", "tiny": {"hidden": 32, "layers": 2, "feed_forward": 48, "context": 96}},
    "format": {"name": "r1_zero", "preamble": False},
    "cluster": {"slots": 2, "patience": PATIENCE, "deadline": 60.0},
    "stages": {
        "sft": {
            "steps": 4,
            "data": {"arithmetic": {"count": 60, "operations": 2}},
            "batch": {"sequences": 6, "token_budget": 128},
            "checkpoint": {"every": 2},
        },
        "rl": {
            "algorithm": {"name": "grpo", "group_size": 4},
            "steps": 2,
            "data": {"arithmetic": {"count": 40, "operations": 2}},
            "rewards": [PARITY],
            "rollout": {"max_tokens": 4},
            "batch": {"problems": 4, "token_budget": 256},
            "optim": {"lr": 2e-3},
        },
    },
}
Outcome = tuple[list[dict[str, Any]], dict[str, bytes]]


def prepare(folder: Path, name: str = "recipe.yaml", **sft: Any) -> list[str]:
    """A command that trains in this folder."""
    folder.mkdir(exist_ok=True)
    stages = RECIPE["stages"] | {"sft": RECIPE["stages"]["sft"] | sft}
    recipe = RECIPE | {"run": RECIPE["run"] | {"dir": str(folder / "run")}, "stages": stages}
    (folder / name).write_text(yaml.safe_dump(recipe, sort_keys=False))
    return ["train", str(folder / name)]


def outcome(folder: Path) -> Outcome:
    """Every metric but timings, and every byte of the final models."""
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("timings")
        row.pop("held_by", None)
    stages = folder / "run/stages"
    return rows, {str(path.relative_to(stages)): path.read_bytes() for path in stages.glob("*/final/*.safetensors")}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def start(
    hosts: Sequence[Machine],
    folder: Path,
    commands: Sequence[Sequence[str]],
    more: Sequence[Mapping[str, str]] = ({}, {}),
) -> list[BaseProcess]:
    """A rank on each of these machines, which find each other by the first one's name."""
    name = "localhost" if hosts[0] is hosts[1] else NAMES[0]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": name, "MASTER_PORT": PORT}
    return [
        host.lemma(commands[rank], folder / f"said-{rank}", env | {"RANK": str(rank)} | more[rank])
        for rank, host in enumerate(hosts)
    ]


def ended(ranks: Sequence[BaseProcess], seconds: float = 60.0) -> list[int | None]:
    until = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, until - time.monotonic()))
    return [rank.exitcode for rank in ranks]


def said(folder: Path) -> list[str]:
    """What each machine says to people."""
    texts = [(folder / f"said-{rank}").read_text() for rank in range(2)]
    return ["\n".join(line for line in text.splitlines() if line.startswith("lemma:")) for text in texts]


def first_checkpoint(folder: Path) -> bool:
    return (folder / "run/stages/sft/checkpoints/step-00000002").exists()


@pytest.fixture(scope="module")
def on_one(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two ranks on one machine."""
    folder = tmp_path_factory.mktemp("one")
    codes = ended(start([pair.machines[0]] * 2, folder, [prepare(folder)] * 2))
    assert codes == [0, 0], said(folder)
    return outcome(folder)


def test_a_cut_network_is_noticed_on_both_sides_and_the_run_goes_on(
    pair: Pair, on_one: Outcome, tmp_path: Path
) -> None:
    """No packet says that the other machine is gone. The host's own name stands for its loopback on both."""
    command = prepare(tmp_path)
    ranks = start(pair.machines, tmp_path, [command] * 2)
    wait_for(lambda: first_checkpoint(tmp_path))
    pair.cut()
    try:
        assert ended(ranks, 60) == [75, 75], said(tmp_path)
        first, second = said(tmp_path)
        assert first.startswith("lemma: nothing was heard of rank 1 on beta, last seen at '") and "for 2 s" in first
        assert "the store of the ranks has not answered for" in second and "rank 0 on alpha, last seen at '" in second
    finally:
        pair.mend()
    assert ended(start(pair.machines, tmp_path, [command] * 2)) == [0, 0], said(tmp_path)
    assert outcome(tmp_path) == on_one


def test_what_does_not_fit_is_one_sentence_on_each_machine(pair: Pair, tmp_path: Path) -> None:
    command = prepare(tmp_path)
    other = prepare(tmp_path, "other.yaml", steps=5)
    assert ended(start(pair.machines, tmp_path, [command, other])) == [2, 2]
    sentence = (
        "lemma: error: stages.sft.steps is 5 for rank 1 on beta, and 4 for rank 0 on alpha; give all machines the same"
    )
    assert said(tmp_path) == [sentence] * 2
    missing = f"there is no recipe {tmp_path / 'away.yaml'}; check the path"
    assert ended(start(pair.machines, tmp_path, [command, ["train", str(tmp_path / "away.yaml")]])) == [2, 2]
    assert said(tmp_path) == [f"lemma: error: rank 1 on beta: {missing}", f"lemma: error: {missing}"]
    away = [{}, {"GLOO_SOCKET_IFNAME": "lo"}]
    assert ended(start(pair.machines, tmp_path, [command] * 2, away)) == [2, 2]
    (sentence,) = set(said(tmp_path))
    assert "rank 0 on alpha (10.77.0.1) does not reach rank 1 on beta at 127.0.0.1 (Connection refused)" in sentence
    (tmp_path / "run").mkdir(exist_ok=True)
    pair.machines[1].hide(tmp_path / "run")
    assert ended(start(pair.machines, tmp_path, [command] * 2)) == [2, 2]
    folder = tmp_path / "run"
    sentence = f"rank 0 on alpha does not see what rank 1 on beta writes to {folder}; set run.dir to a folder that all"
    assert [line.startswith(f"lemma: error: {sentence}") for line in said(tmp_path)] == [True] * 2
    assert not any(folder.iterdir()), "nothing was begun"


# --- by `make test-machines` ---------------------------------------------------------------------------------------


def launched(pair: Pair, folder: Path, commands: Sequence[Sequence[str]], fault: str = "") -> list[int]:
    """Programs that are started anew on each machine; their exit codes."""
    env = os.environ | {"LEMMA_FAULT": fault}
    processes = []
    for machine, words in zip(pair.machines, commands, strict=True):
        with open(folder / f"said-{len(processes)}", "w") as file:
            processes.append(subprocess.Popen(machine.command(words), stdout=file, stderr=file, env=env))
    try:
        return [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()


@machines
@pytest.mark.parametrize("names", ["address", "host"])
def test_torchrun(pair: Pair, on_one: Outcome, tmp_path: Path, names: str) -> None:
    """With addresses alone, and with names, of which the own one stands for the loopback. A rank that dies is started
    again with the others, though the torchrun of each machine counts starts by itself."""
    place = ["--rdzv-endpoint", f"{NAMES[0] if names == 'host' else ADDRESSES[0]}:{PORT}"]
    commands = []
    for rank in range(2):
        own = [] if names == "host" else ["--local-addr", ADDRESSES[rank], "--rdzv-conf", f"is_host={1 - rank}"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        launcher += ["--max-restarts", "2"]
        commands.append([*launcher, "--rdzv-backend", "c10d", *place, *own, "-m", "lemma", *prepare(tmp_path)])
    fault = "stage.step_end:3@1" if names == "host" else ""
    assert launched(pair, tmp_path, commands, fault) == [0, 0], said(tmp_path)
    assert outcome(tmp_path) == on_one


@machines
def test_accelerate_launch(pair: Pair, on_one: Outcome, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "2", "--main_process_ip", ADDRESSES[0], "--main_process_port", PORT]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    commands = [[*launch, "--machine_rank", str(rank), "-m", "lemma", *prepare(tmp_path)] for rank in range(2)]
    assert launched(pair, tmp_path, commands) == [0, 0], said(tmp_path)
    assert outcome(tmp_path) == on_one


@machines
@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_lost_is_named(pair: Pair, on_one: Outcome, tmp_path: Path, lost: int) -> None:
    command = prepare(tmp_path)
    ranks = start(pair.machines, tmp_path, [command] * 2)
    wait_for(lambda: first_checkpoint(tmp_path))
    pair.machines[lost].kill()
    assert ended(ranks, 15)[1 - lost] == 75
    assert f"rank {lost} on {NAMES[lost]}, last seen at '" in said(tmp_path)[1 - lost]
    assert ended(start(pair.machines, tmp_path, [command] * 2)) == [0, 0], said(tmp_path)
    assert outcome(tmp_path) == on_one


@machines
def test_an_interruption_on_one_machine_stops_both_in_good_order(pair: Pair, on_one: Outcome, tmp_path: Path) -> None:
    command = prepare(tmp_path)
    ranks = start(pair.machines, tmp_path, [command] * 2)
    wait_for(lambda: first_checkpoint(tmp_path))
    os.kill(ranks[1].pid or 0, signal.SIGINT)
    assert ended(ranks) == [0, 0], said(tmp_path)
    assert "stopped" in (tmp_path / "said-0").read_text()
    assert ended(start(pair.machines, tmp_path, [command] * 2)) == [0, 0], said(tmp_path)
    assert outcome(tmp_path) == on_one


@machines
def test_a_server_on_the_other_machine(pair: Pair, on_one: Outcome, tmp_path: Path) -> None:
    """It is sent the weights over the network."""
    alpha, beta = pair.machines
    variables = {KEY_VARIABLE: "known to both"}
    words = ["serve", "tiny", "--rollouts", "--host", ADDRESSES[1], "--port", "8765"]
    server = beta.lemma(words, tmp_path / "server", variables)
    try:
        engine = f"{{name: native, servers: ['http://{ADDRESSES[1]}:8765']}}"
        command = [*prepare(tmp_path), "--set", f"stages.rl.rollout.engine={engine}"]
        assert ended(start([alpha] * 2, tmp_path, [command] * 2, [variables] * 2)) == [0, 0], said(tmp_path)
    finally:
        server.kill()
        server.join()
    assert outcome(tmp_path) == on_one


@machines
def test_weights_split_over_machines(pair: Pair, tmp_path: Path) -> None:
    outcomes = []
    for name, hosts in (("one", [pair.machines[0]] * 2), ("two", pair.machines)):
        command = [*prepare(tmp_path / name), "--only", "sft", "--set", "cluster.shard=weights"]
        assert ended(start(hosts, tmp_path, [command] * 2)) == [0, 0], said(tmp_path)
        outcomes.append(outcome(tmp_path / name))
    assert outcomes[0] == outcomes[1]


@machines
def test_an_evaluation_on_two_machines(pair: Pair, tmp_path: Path) -> None:
    arithmetic = {"operations": 1, "largest": 10, "count": 14}
    sums = {"name": "sums", "source": "arithmetic", "arithmetic": arithmetic, "rules": {"symbolic": False}}
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(sums))
    for name, hosts in (("one", [pair.machines[0]] * 2), ("two", pair.machines)):
        command = ["eval", "tiny", "--benchmarks", str(tmp_path / "sums.yaml"), "--to", str(tmp_path / name)]
        command += [
            "--samples",
            "3",
            "--temperature",
            "1",
            "--max-tokens",
            "8",
            "--format",
            "r1_zero",
            "--device",
            "cpu",
        ]
        assert ended(start(hosts, tmp_path, [command] * 2)) == [0, 0], said(tmp_path)
    for file in ("results.csv", "samples.jsonl", "questions.csv", "settings.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


@machines
def test_data_that_differ_are_refused(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, more in (("ours.jsonl", 1), ("theirs.jsonl", 2)):
        rows = [{"prompt": f"what is {n} + {more} ?", "completion": str(n + more)} for n in range(40)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair.machines[1].hide(folder)
    for name, machine in zip(("ours.jsonl", "theirs.jsonl"), pair.machines, strict=True):
        machine.do("cp", str(tmp_path / name), str(folder / "train.jsonl"))
    command = prepare(tmp_path, data={"source": str(folder / "train.jsonl"), "cache": str(folder / "cache")})
    assert ended(start(pair.machines, tmp_path, [command] * 2)) == [2, 2]
    sentence = "stage sft: rank 1 on beta finds other content for the data than rank 0 on alpha; let all machines read"
    assert [sentence in line for line in said(tmp_path)] == [True] * 2


@machines
def test_a_run_folder_that_is_not_shared_leaves_nothing_behind(pair: Pair, tmp_path: Path) -> None:
    command = prepare(tmp_path / "home")
    (tmp_path / "home/there").mkdir()
    pair.machines[1].hide(tmp_path / "home/there")
    command += ["--set", f"run.dir={tmp_path / 'home/there/runs/mine'}"]
    assert ended(start(pair.machines, tmp_path, [command] * 2)) == [2, 2]
    assert ["; set run.dir to a folder that all machines share" in line for line in said(tmp_path)] == [True] * 2
    for machine in pair.machines:
        assert machine.do("ls", "-A", str(tmp_path / "home/there")) == "", machine.name


@machines
@pytest.mark.parametrize("command", ["eval", "debug", "generate"])
def test_commands_that_only_generate_compare_what_machines_read(pair: Pair, tmp_path: Path, command: str) -> None:
    """The second machine has another file under the same name."""
    name = {"eval": "rows.jsonl", "debug": "recipe.yaml", "generate": "questions.txt"}[command]
    folder = tmp_path / "own"
    folder.mkdir()
    pair.machines[1].hide(folder)
    for number, machine in enumerate(pair.machines):
        if command == "debug":
            prepare(tmp_path)
            text = (tmp_path / "recipe.yaml").read_text().replace("max_tokens: 4", f"max_tokens: {4 + number}")
        elif command == "eval":
            text = "".join(
                json.dumps({"question": f"{n} + 1 ?", "answer": str(n + 1 + number)}) + "\n" for n in range(4)
            )
        else:
            text = f"what is 1 + {number} ?\nwhat is 2 + 2 ?\n"
        (tmp_path / "text").write_text(text)
        machine.do("cp", str(tmp_path / "text"), str(folder / name))
    words = {
        "eval": ["--benchmarks", str(folder / name), "--to", str(tmp_path / "out"), "--max-tokens", "4"],
        "debug": ["--recipe", str(folder / name), "--groups", "2"],
        "generate": ["--file", str(folder / name), "--max-tokens", "4"],
    }[command]
    assert ended(start(pair.machines, tmp_path, [[command, "tiny", *words, "--device", "cpu"]] * 2)) == [2, 2]
    sentence = {
        "eval": "rank 1 on beta finds other content for the problems of rows than rank 0 on alpha; let all machines",
        "debug": "stages.rl.rollout.max_tokens is 5 for rank 1 on beta, and 4 for rank 0 on alpha; give all machines",
        "generate": "rank 1 on beta finds other content for the questions, as prompts than rank 0 on alpha; let all",
    }[command]
    assert [sentence in line for line in said(tmp_path)] == [True] * 2, said(tmp_path)
