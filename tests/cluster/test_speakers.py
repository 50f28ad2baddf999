"""Ranks that only speak: what is sampled and learnt is what one process samples and learns, also after their deaths."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lemma.cli import main
from lemma.cluster.rank_watch import LOST
from lemma.core.errors import UserError
from lemma.core.ranks import RankWorld, joined, rank
from lemma.engines import weight_broadcast
from lemma.models.memory import GIB
from tests.cluster.crew import Crew
from tests.cluster.forked import Forked, wait_for
from tests.cluster.test_rl_ranks import ALGORITHMS, MODEL, recipe_of, samples
from tests.cluster.test_run_ranks import outcome, trained

GRPO = ALGORITHMS["grpo"]


def trained_or_spoken(content: dict[str, Any], learners: int, speakers: int, is_deaf: bool = False) -> list[str]:
    """Run a recipe on this rank, speak for those that do, or only take part in making groups. The warnings that were
    given, or the mistake; a deaf speaker keeps the weights that it has."""
    import torch.distributed as dist

    from lemma.cluster.speaker import speak
    from lemma.cluster.speaker_link import divided, groups_of

    size = learners + speakers
    group = dist.new_group(list(range(size)))
    if rank() >= size:
        if speakers:
            groups_of(learners, size, False, 60.0)
        return []
    world = RankWorld(rank(), size, 1, group, group)
    take = weight_broadcast.take
    if is_deaf:
        weight_broadcast.take = _taken_in_vain(take)
    try:
        with joined(world), divided(world, speakers, deadline=60.0) as mine:
            if not mine.is_speaker:
                return trained(content)
            speak(mine, lambda event: None)
    except UserError as error:
        return [str(error)]
    except RuntimeError:  # a learner that met a mistake is gone, and says it
        assert rank() >= learners
    finally:
        weight_broadcast.take = take
    return []


def _taken_in_vain(take: Any) -> Any:
    def taken(policy: Any, *args: Any) -> None:
        before = {name: parameter.detach().clone() for name, parameter in policy.parameters().items()}
        take(policy, *args)
        for name, parameter in policy.parameters().items():
            parameter.data.copy_(before[name])

    return taken


def run(crew: Crew, content: dict[str, Any], learners: int, speakers: int, is_deaf: bool = False) -> list[str]:
    said: list[str] = crew.run(4, trained_or_spoken, content, learners, speakers, is_deaf)[0]
    return said


def timings(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["timings"] for row in rows if row["axis"] == "train"]


def test_one_learner_and_one_speaker(crew: Crew, tmp_path: Path) -> None:
    """What is trained here is an adapter, so that is all that travels."""
    model = {"model": MODEL | {"lora": {"r": 4}}}
    run(crew, recipe_of(tmp_path, "alone", GRPO, slots=1) | model, 1, 0)
    run(crew, recipe_of(tmp_path, "spoken", GRPO, slots=1) | model, 1, 1)
    assert outcome(tmp_path / "spoken", "merged") == outcome(tmp_path / "alone", "merged")
    assert samples(tmp_path / "spoken") == samples(tmp_path / "alone")
    for row in timings(tmp_path / "spoken"):
        assert 0 < row["speak_seconds"] <= row["generate_seconds"] + row["grade_seconds"], "it was all waited for"


def test_several_learners_and_several_speakers(crew: Crew, tmp_path: Path) -> None:
    """Two and two; two whom one speaker serves; two slots of one learner at the same time, and a speaker too many."""
    stage = GRPO | {"validation": {"share": 0.25, "every": 2}}
    run(crew, recipe_of(tmp_path, "alone", stage, slots=2), 1, 0)
    for learners, speakers in ((2, 2), (2, 1), (1, 3)):
        name = f"spoken-{speakers}"
        told = run(crew, recipe_of(tmp_path, name, stage, slots=2), learners, speakers)
        assert any("1 of 3 speakers have nothing to do" in text for text in told) == (speakers == 3)
        assert outcome(tmp_path / name) == outcome(tmp_path / "alone")
        assert samples(tmp_path / name) == samples(tmp_path / "alone")


def asked_and_told(content: dict[str, Any], learners: int, speakers: int) -> tuple[int, list[str]]:
    """How many speakers this rank has sent requests to, and the warnings that were given."""
    from lemma.engines.generator_engine import _Session

    peers, add = set(), _Session.add

    def noted(session: _Session, request: Any) -> None:
        add(session, request)
        peers.add(id(session.owed[request.key][0]))

    _Session.add = noted  # type: ignore[method-assign]
    try:
        told = trained_or_spoken(content, learners, speakers)
    finally:
        _Session.add = add  # type: ignore[method-assign]
    return len(peers), told


def test_all_speakers_work_for_one_slot_where_responses_fly(crew: Crew, tmp_path: Path) -> None:
    stage = GRPO | {"steps": 1, "rollout": {"max_tokens": 4, "lag": "flying"}}
    count, told = crew.run(4, asked_and_told, recipe_of(tmp_path, "run", stage, slots=1), 1, 3)[0]
    assert count == 3 and not any("nothing to do" in text for text in told), told


def test_learners_that_split_their_weights(crew: Crew, tmp_path: Path) -> None:
    """With `shard: weights` nobody else could generate here. Sums are added up in another order, so bits differ."""
    run(crew, recipe_of(tmp_path, "alone", GRPO, slots=2), 1, 0)
    content = recipe_of(tmp_path, "spoken", GRPO, slots=2)
    content["cluster"] |= {"shard": "weights", "speakers": 1}
    run(crew, content, 2, 1)
    alone, spoken = (
        load_file(tmp_path / name / "stages/stage/final/model.safetensors") for name in ("alone", "spoken")
    )
    assert all(torch.allclose(spoken[name], alone[name], atol=1e-4) for name in alone)


def updated_last(content: dict[str, Any], learners: int, speakers: int) -> int:
    """Train, or speak; no update ends before all that is sampled ahead is there. How many steps were, in a thread."""
    from lemma.stages.reinforcement import rl_loop
    from lemma.stages.reinforcement.sampling_thread import SamplingThread

    begin, update, tasks = SamplingThread.begin, rl_loop.update, []

    def begun(thread: Any, work: Any) -> Any:
        tasks.append(begin(thread, work))
        return tasks[-1]

    def updated(*args: Any) -> Any:
        for task in tasks:
            task.result(timeout=30)
        return update(*args)

    SamplingThread.begin, rl_loop.update = begun, updated  # type: ignore[method-assign, assignment]
    try:
        trained_or_spoken(content, learners, speakers)
    finally:
        SamplingThread.begin, rl_loop.update = begin, update  # type: ignore[method-assign]
    return len(tasks)


def test_with_a_lag_generation_runs_beside_the_update(crew: Crew, tmp_path: Path) -> None:
    """While an update waits for it: so it needs nothing of the thread that learns."""
    changes = {"steps": 4, "rollout": {"max_tokens": 4, "lag": 1}}
    run(crew, recipe_of(tmp_path, "alone", GRPO | changes, slots=1), 1, 0)
    ahead = crew.run(4, updated_last, recipe_of(tmp_path, "spoken", GRPO | changes, slots=1), 1, 1)
    assert ahead[0] == 3
    assert outcome(tmp_path / "spoken") == outcome(tmp_path / "alone")


def test_a_speaker_that_holds_other_weights_is_found_out(crew: Crew, tmp_path: Path) -> None:
    (said,) = run(crew, recipe_of(tmp_path, "run", GRPO, slots=1), 1, 1, is_deaf=True)
    assert "a speaker does not hold the policy's weights after the update to version 1" in said


def test_weights_travel_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_broadcast, "BUCKET_BYTES", 64)
    layout = [("a", (3, 5), "float32"), ("b", (2,), "bfloat16"), ("c", (), "float32"), ("d", (40,), "bfloat16")]
    buckets = list(weight_broadcast.buckets_of(layout))
    sent: dict[str, list[int]] = {name: [] for name, _, _ in layout}
    for bucket in buckets:
        end = 0
        for part in bucket:
            assert part.offset >= end and part.offset % 16 == 0
            end = part.offset + part.count * part.dtype.itemsize
            sent[part.name] += range(part.start, part.start + part.count)
        assert end <= 64
    assert sent == {"a": list(range(15)), "b": [0, 1], "c": [0], "d": list(range(40))}
    assert len(buckets) == 3 and buckets[0][0].dtype == torch.float32


# --- deaths --------------------------------------------------------------------------------------------------------


def prepare(folder: Path, steps: int = 3) -> Path:
    content = recipe_of(folder, "run", GRPO | {"steps": steps}, slots=1)
    content["cluster"] = {"speakers": 1, "slots": 1, "patience": 10.0, "deadline": 60.0}
    (folder / "recipe.yaml").write_text(json.dumps(content))
    return folder


def test_a_speaker_that_is_asked_to_stop_or_dies(crew: Crew, tmp_path: Path) -> None:
    """SIGTERM to the speaker alone ends the run after its step; kill -9 of it starts all again, and nothing changes."""
    run(crew, recipe_of(tmp_path, "alone", GRPO | {"steps": 3}, slots=1), 1, 0)
    launcher = Forked(prepare(tmp_path), fault="speaker.spoken:5:SIGTERM@1")
    assert launcher.run() == 0 and launcher.said == [], (launcher.said, launcher.output)
    assert "stopped after saving" in launcher.output and not (tmp_path / "run/stages/stage/done.json").exists()
    launcher = Forked(tmp_path, fault="speaker.spoken:5@1")
    assert launcher.run() == 0, launcher.output
    assert launcher.said == ["rank 1 was killed by SIGKILL; starting the 2 ranks again (1 of 3)"]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "alone")
    assert samples(tmp_path / "run") == samples(tmp_path / "alone")


def test_learners_notice_a_dead_speaker_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a scheduler that leaves the other processes alone: one sentence that names the rank."""
    launcher = Forked(prepare(tmp_path, steps=10**6))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LEMMA_LAUNCHER": ""}
    outputs = [tmp_path / "learner.txt", tmp_path / "speaker.txt"]
    command = ["train", str(tmp_path / "recipe.yaml")]
    learner, speaker = (
        launcher.start_rank(command, env | {"RANK": str(number), "LOCAL_RANK": str(number)}, output)
        for number, output in enumerate(outputs)
    )
    try:
        rows = tmp_path / "run/metrics.jsonl"
        wait_for(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 2, 120)
        began = time.monotonic()
        os.kill(speaker.pid, signal.SIGKILL)
        wait_for(lambda: learner.poll() is not None, 30)
        assert time.monotonic() - began < 30
        assert learner.wait() == LOST
        assert "rank 1 on " in outputs[0].read_text()
    finally:
        for process in (learner, speaker):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


# --- the command line ----------------------------------------------------------------------------------------------


def test_what_cannot_work_is_said_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepare(tmp_path))
    for arguments, said in (
        (
            ["train", "recipe.yaml", "--ranks", "1"],
            "--ranks 1 leaves nobody to learn next to 1 speaker; write --ranks 2",
        ),
        (["train", "recipe.yaml", "--speakers", "2", "--set", "cluster.ranks=2"], "of 2 ranks none is left to learn"),
        (["plan", "recipe.yaml", "--set", "stages.stage.rollout.engine=vllm"], "generate with the native engine"),
        (
            ["plan", "recipe.yaml", "--ranks", "1"],
            "--ranks 1 leaves nobody to learn next to 1 speaker; write --ranks 2",
        ),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
    sft = {"stages": {"sft": {"steps": 1, "data": {"arithmetic": {"count": 9}}}}, "cluster": {"speakers": 1}}
    Path("sft.yaml").write_text(json.dumps(sft))
    assert main(["plan", "sft.yaml"]) == 2
    assert "nothing for `cluster.speakers` to do" in capsys.readouterr().err


def test_the_plan_tells_the_memory_of_a_speaker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """7.6 billion parameters in bf16: 14.2 GiB of weights, and nothing of an optimiser."""
    recipe = {"model": {"path": "qwen2.5-7b"}, "cluster": {"speakers": 2}}
    stage = {"steps": 1, "data": {"arithmetic": {"count": 9}}, "rollout": {"max_tokens": 512}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe | {"stages": {"grpo": stage}}))
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--ranks", "8", "--gpu", "h100-80"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("6 ranks learn, 2 only speak"))
    assert "weights 14.2 GiB" in line and "optimiser" not in line
    tokens = int(line.split("room for ")[1].split(" ")[0].replace(",", ""))
    left = 0.95 * 79.6 - 14.2 * 1.03 - 0.75
    assert tokens * 2 * 28 * 512 * 2 / GIB == pytest.approx(left, rel=0.01)
