"""The table of runs, cleaning up, and two runs compared, on folders of real runs."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path

import pytest

from lemma.cli import main
from lemma.learning.checkpoint import CheckpointStore
from lemma.reports.run_table import in_bytes, in_days, size_of
from tests.reports.made_runs import evaluate, recipe, small_run
from tests.stages.sft_world import World


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A real run of six steps with two checkpoints."""
    world = World(tmp_path_factory.mktemp("trained"))
    assert world.train(world.recipe()) == 0
    return world


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_tells_state_stage_step_and_best(
    trained: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(tmp_path / "deep" / "dead", steps=4)
    (tmp_path / "done").symlink_to(trained.run)
    head, *rows = lines(capsys, "runs", str(tmp_path))
    assert head.split() == ["run", "state", "stage", "step", "best", "age", "size"]
    (row,) = rows
    assert re.search(r"deep/dead +dead +grpo +4 of 4 +right 0\.4% at 4", row), "links are not followed"
    (row,) = lines(capsys, "runs", str(trained.run))[1:]
    assert "finished" in row and "sft" in row and "validation loss" in row
    assert lines(capsys, "runs", str(tmp_path / "deep" / "dead" / "stages")) == [
        f"there is no run in {tmp_path / 'deep' / 'dead' / 'stages'}"
    ]


def test_of_equal_numbers_the_first_is_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for the checkpoint that is kept as the best."""
    small_run(tmp_path / "run", steps=4)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        for step, value in ((1, 0.25), (2, 0.5), (3, 0.5), (4, 0.25)):
            row = {"stage": "grpo", "axis": "eval", "step": step, "evaluation/sums/answer_accuracy": value}
            file.write(json.dumps(row) + "\n")
    (row,) = lines(capsys, "runs", str(tmp_path))[1:]
    assert "accuracy 50.0% at 2" in row


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path / "nothing")]) == 2
    assert main(["runs", "clean", str(tmp_path / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_cleaning_frees_what_it_says_and_leaves_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    assert world.train(world.recipe()) == 0
    store = CheckpointStore(world.run / "stages" / "sft" / "checkpoints", 9, lambda text: None)
    best = store.best()
    assert best is not None and len(store.steps()) > 1
    before = size_of(world.run)
    assert lines(capsys, "runs", "clean", str(tmp_path))[-1] == "nothing was removed; write --yes to remove all of it"
    assert size_of(world.run) == before

    with open(world.run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert lines(capsys, "runs", "clean", str(tmp_path), "--yes") == ["there is nothing to remove"]

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda text: "n")
    assert lines(capsys, "runs", "clean", str(tmp_path)) == ["freed 0 B"] and size_of(world.run) == before
    monkeypatch.setattr("builtins.input", lambda text: "y")
    assert lines(capsys, "runs", "clean", str(tmp_path)) == [f"freed {in_bytes(before - size_of(world.run))}"]
    assert store.steps() == [best["step"]]
    assert world.train(world.recipe()) == 0, "the run is still finished"
    assert "sft: done already" in world.said()


def test_a_run_that_is_not_finished_keeps_the_way_to_go_on(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=6)
    for step in (2, 4):
        (run / "stages" / "grpo" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert main(["runs", "clean", str(run), "--yes"]) == 0
    assert [path.name for path in (run / "stages/grpo/checkpoints").glob("step-*")] == ["step-00000004"]
    left = sorted(path.name for path in (run / "stages/grpo/journal").iterdir())
    assert left == ["step-000005.jsonl", "step-000006.jsonl"], "a run that goes on from step 4 reads these"
    assert sorted(path.name for path in (run / "stages/grpo/notes").iterdir()) == ["step-000005.npz", "step-000006.npz"]


def test_sizes_and_ages_in_words() -> None:
    assert [in_bytes(size) for size in (7, 12_300, 1_230_000, 456e6, 7.89e12)] == [
        "7 B", "12 kB", "1.2 MB", "456 MB", "7890 GB",
    ]  # fmt: skip
    assert [in_days(age) for age in (5, 130, 7300, 200_000)] == ["5 s", "2 min", "2 h", "2 d"]


def test_two_runs_are_compared_by_options_curves_and_paired_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = small_run(tmp_path / "a", steps=6), small_run(tmp_path / "b", steps=9)
    recipe(second, steps=9, optim={"lr": 3e-5})
    evaluate(first / "evaluations" / "grpo" / "step-000000", [False] * 40)
    evaluate(first / "evaluations" / "grpo" / "step-000006", [False] * 30 + [True] * 10)
    evaluate(second / "evaluations" / "grpo" / "step-000009", [False] * 2 + [True] * 38)
    out = "\n".join(lines(capsys, "compare", str(first), str(second), "--json", str(tmp_path / "found.json")))
    assert "stages.grpo.steps: 6 in A, 9 in B" in out and "stages.grpo.optim.lr" in out and "run.dir" not in out
    assert "last tenth of 6 steps" in out, "no further than both have come"
    assert "B is better by 70.0 points" in out and "B gains 28 and loses 0" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["evaluations"][0]["gained"] == 28
    assert next(one for one in found["curves"] if one["name"] == "length/mean")["first"] == 106.0


def test_a_run_is_not_compared_with_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "a", steps=1)
    evaluate(run / "evaluations" / "x", [True])
    assert main(["compare", str(run), str(run / "evaluations" / "x")]) == 2
    assert f"two runs, or two evaluations: those of the run are in {run}/evaluations" in capsys.readouterr().err
    other = small_run(tmp_path / "b", steps=1)
    assert main(["compare", str(other), str(run / "evaluations" / "x")]) == 2
    assert f"two evaluations: make one with `lemma eval {other}`" in capsys.readouterr().err
