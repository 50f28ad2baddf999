"""Ranks on a real local Ray cluster: they find each other, a death restarts all, a user's error ends all."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lemma.cli.train import _arguments
from lemma.plugins.ray.ray_actors import Home, ProcessActor
from lemma.plugins.ray.ray_job_spec import job_spec_of
from lemma.plugins.ray.ray_launch import ActorProcess, RayJobSpec, launch_on_ray, variables_of
from lemma.recipe import load_recipe


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        import ray

        with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # sockets want it short
            ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
            yield
            ray.shutdown()


def spec(folder: Path, *arguments: str) -> RayJobSpec:
    return RayJobSpec(
        arguments=[str(folder), *arguments], ranks=2, wants_gpus=False, restarts=2, run_folder=folder / "run",
        fresh=True, module="tests.cluster.ray_program",
    )  # fmt: skip


@pytest.mark.usefixtures("cluster")
def test_a_dead_rank_ends_and_restarts_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_on_ray(spec(tmp_path)) == 0
    words = {path.name: path.read_text().split() for path in tmp_path.glob("rank-*")}
    assert set(words) == {f"rank-{rank}-{attempt}" for rank in (0, 1) for attempt in (1, 2, 3)}
    assert all(found[0] == "3" and found[2:4] == ["2", "2"] for found in words.values())
    assert [words[f"rank-{rank}-2"][1] for rank in (0, 1)] == ["0", "1"]
    assert words["rank-0-1"][4] == words["rank-1-1"][4] != words["rank-0-2"][4], "every attempt has a port of its own"
    told = [words[f"rank-0-{attempt}"][5:] for attempt in (1, 2, 3)]
    assert told == [["--fresh"], ["--fresh"], []], "the first attempt began nothing, the second one did"
    out, err = capfd.readouterr()
    assert "rank 0 attempt 1" in out and "rank 0 attempt 2" in out and "rank 1" not in out
    assert "rank 1 on " in err and " was killed by SIGKILL; starting the 2 ranks again (1 of 2)" in err


@pytest.mark.usefixtures("cluster")
def test_an_error_of_the_users_is_not_tried_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for earlier in ("rank-1-a", "rank-1-b"):
        (tmp_path / earlier).touch()  # this time the second rank lives
    assert launch_on_ray(spec(tmp_path, "--wrong")) == 2
    out, err = capfd.readouterr()
    assert (out + err).count("error: one sentence") == 1 and "again" not in err


ASKED_TWICE = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.SIG_DFL))
print("ready", flush=True)
time.sleep(60)
"""


class Direct:
    """A method of an actor, called here."""

    def __init__(self, method: Callable[..., object]):
        self.remote = method


def test_a_second_interrupt_reaches_a_rank_as_one(tmp_path: Path) -> None:
    """A rank that was asked to end after its step ends at once by a second Ctrl-C, and by no second SIGTERM."""
    (tmp_path / "patient.py").write_text(ASKED_TWICE)
    actor = ProcessActor()
    try:
        actor.start("patient", [], {}, str(tmp_path))
        until = time.monotonic() + 30
        while "ready" not in actor.look(0)[1] and time.monotonic() < until:
            time.sleep(0.02)
        handle = argparse.Namespace(interrupt=Direct(actor.interrupt))
        rank = ActorProcess(handle, Home("a", "127.0.0.1", ()), 0)
        while actor.look(0)[0] is None and time.monotonic() < until:
            rank.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert actor.look(0)[0] == -signal.SIGINT
    finally:
        actor.close()


def test_what_torchrun_would_set() -> None:
    homes = [Home("a", "10.0.0.1", ("3",)), Home("a", "10.0.0.1", ("5",)), Home("b", "10.0.0.2", ("0",))]
    found = variables_of(homes, 4000)
    assert [one["RANK"] for one in found] == ["0", "1", "2"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "2", "1"]
    assert [one["GROUP_RANK"] for one in found] == ["0", "0", "1"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["3,5", "3,5", "0"]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found} == {("3", "10.0.0.1", "4000")}


def test_the_wish_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        f"run: {{dir: {tmp_path}/run, device: cpu}}\n"
        "cluster: {ranks: 3, restarts: 5}\n"
        "stages: {sft: {steps: 1}, grpo: {steps: 1, rollout: {engine: {name: vllm, servers: 2, cache_gib: 0.1}}}}"
    )
    args = argparse.Namespace(
        recipe=str(tmp_path / "recipe.yaml"), overrides=["run.seed=1"], skip=[], only=["grpo"], fresh=True, extend=False
    )
    recipe = load_recipe(args.recipe, args.overrides)
    found = job_spec_of(recipe, _arguments(args, args.recipe), None, fresh=args.fresh)
    assert found.arguments == ["train", args.recipe, "--set=run.seed=1", "--only=grpo"] and found.fresh
    assert (found.ranks, found.restarts, found.stages, len(found.servers)) == (3, 5, ["grpo"], 2)
    folder, *options = found.servers[0]
    assert (Path(folder) / "config.json").exists()
    assert options[:2] == ["--dtype", "float32"] and "--cache-gib" in options
    told = load_recipe(
        args.recipe, [*args.overrides, 'stages.grpo.rollout.engine.servers=["http://a:1", "http://b:2"]']
    )
    assert told.digest() == recipe.digest(), "where the servers are has no effect on what is learnt"
