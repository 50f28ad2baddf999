"""A run folder from somebody else: whatever it holds, nothing outside it is written, moved or removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import LemmaWarning, UserError
from lemma.core.events import Said
from lemma.evaluation.results import alone_in
from lemma.recipe import Recipe
from lemma.reporting.logfile import LogFile
from lemma.reports.report_file import write_report
from lemma.reports.run_cleaning import find_spare, remove
from lemma.reports.run_reader import RunReader, open_runs
from lemma.reports.run_table import list_runs
from lemma.runs.exporting import export_model
from lemma.runs.run_folder import RunFolder
from tests.reports.made_runs import small_run


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    (folder / "step-000002").mkdir(parents=True)
    (folder / "file").write_text("as it was")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "foreign")


def make_run(folder: Path, stage: str = "sft") -> Path:
    (folder / "stages").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"stages: {{{json.dumps(stage)}: {{}}}}\n")
    (folder / "run.json").write_text('{"digest": "d", "threads": 1}')
    return folder


def untouched(victim: Path) -> bool:
    return (victim / "file").read_text() == "as it was" and (victim / "step-000002").is_dir()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["VICTIM", "../../victim", "stages/../../../victim", "stages/..", "", 7, "stages/a\n"])
def test_names_of_what_was_set_aside_that_lead_outside(run: Path, victim: Path, name: Any, whole: bool) -> None:
    (run / ".earlier").mkdir()
    name = str(victim) if name == "VICTIM" else name
    (run / ".earlier" / "names.json").write_text(json.dumps({"whole": whole, "names": [name]}))
    with pytest.raises(UserError, match=r"names.json is damaged"):
        RunFolder(run)
    assert untouched(victim)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"whole": true}', '{"whole": true, "names": 3}', "\x00"])
def test_damaged_names_are_a_sentence(run: Path, text: str) -> None:
    (run / ".earlier").mkdir()
    (run / ".earlier" / "names.json").write_text(text)
    with pytest.raises(UserError, match=r"names.json is damaged"):
        RunFolder(run)


@pytest.mark.parametrize(
    "link", [".lock", "metrics.jsonl", "run.log", "run.json", ".earlier", "stages/sft/checkpoints", "tensorboard"]
)
def test_links_that_lead_outside(run: Path, victim: Path, link: str) -> None:
    (run / link).parent.mkdir(exist_ok=True, parents=True)
    (run / link).unlink(missing_ok=True)
    is_folder = "." not in link.lstrip(".")
    (run / link).symlink_to(victim if is_folder else victim / "file")
    with pytest.raises(UserError, match="is a link that leads out of the run folder"):
        RunFolder(run)
    assert untouched(victim)


def test_files_with_another_name_elsewhere_are_appended_to_here_alone(run: Path, victim: Path) -> None:
    for name in ("metrics.jsonl", "run.log"):
        (run / name).hardlink_to(victim / "file")
    folder = RunFolder(run)
    folder.begin("stages: {}\n", "d", 1, fresh=())
    assert folder.metrics is not None
    folder.metrics.append({"step": 1})
    folder.close()
    log = LogFile(run / "run.log")
    log(Said("here"))
    log.close(failed=False)
    assert untouched(victim) and "here" in (run / "run.log").read_text()


def test_the_lock_of_an_evaluation_empties_nothing(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / ".lock").hardlink_to(victim / "file")
    with alone_in(tmp_path / "evaluation"):
        assert untouched(victim)


def test_links_that_stay_inside_and_a_run_folder_that_is_a_link(run: Path, tmp_path: Path) -> None:
    (run / "wandb" / "run-1").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run-1")
    (tmp_path / "elsewhere").symlink_to(run)
    RunFolder(tmp_path / "elsewhere").close()


def test_folders_of_weights_and_biases_link_to_its_log(run: Path, victim: Path) -> None:
    """Whether they are in use, set aside by a fresh start, or being deleted; but only where nothing is written."""
    for place in ("wandb", ".earlier/wandb", ".doomed-0/wandb"):
        (run / place / "run-1" / "logs").mkdir(parents=True)
        (run / place / "run-1" / "logs" / "debug-core.log").symlink_to(victim / "file")
    folder = RunFolder(run)
    folder.close()
    assert not (run / ".doomed-0").exists() and untouched(victim)
    (run / "stages" / "wandb").mkdir()
    (run / "stages" / "wandb" / "checkpoints").symlink_to(victim)
    with pytest.raises(UserError, match="stages/wandb/checkpoints is a link that leads out"):
        RunFolder(run)
    (run / "stages" / "wandb" / "checkpoints").unlink()
    (run / "wandb" / "run-2").symlink_to(victim)
    with pytest.raises(UserError, match="wandb/run-2 is a link that leads out"):
        RunFolder(run)


def test_a_file_that_is_none(run: Path) -> None:
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl is not a file"):
        RunFolder(run)


def test_an_export_is_written_in_the_run(run: Path, victim: Path) -> None:
    (run / "export").symlink_to(victim)
    (victim / ".sft-2-full.partial").mkdir()
    with pytest.raises(UserError, match="export is a link that leads out of the run folder"):
        export_model(Recipe(stages={"sft": {}}), run, stage="sft", checkpoint="last", kind="full", to=None)
    assert untouched(victim) and (victim / ".sft-2-full.partial").is_dir()


@pytest.mark.parametrize("link", [".lock", "gsm8k.jsonl", "journal"])
def test_an_evaluation_is_written_in_its_folder(tmp_path: Path, victim: Path, link: str) -> None:
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (folder / link).symlink_to(victim if link == "journal" else victim / "file")
    with pytest.raises(UserError, match="is a link that leads out of the evaluation"), alone_in(folder):
        pass
    assert untouched(victim)


def test_clean_takes_nothing_from_outside(tmp_path: Path, victim: Path) -> None:
    """Neither by the name of a stage nor by a link; a run of one's own is cleaned all the same."""
    runs = tmp_path / "runs"
    make_run(runs / "named", "../../../victim")
    linked = make_run(runs / "linked")
    (linked / "stages" / "sft").mkdir()
    (linked / "stages" / "sft" / "checkpoints").symlink_to(victim)
    own = make_run(runs / "own")
    for step in (2, 4):
        (own / "stages" / "sft" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    (victim / "checkpoints").symlink_to(victim)
    with pytest.warns(LemmaWarning, match="linked is left as it is"):
        spare = find_spare(runs)
    assert [one.run.name for one in spare] == ["own"]
    remove(spare)
    assert untouched(victim) and [path.name for path in (own / "stages/sft/checkpoints").iterdir()] == ["step-000004"]


def test_runs_that_cannot_be_read_do_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    (make_run(tmp_path / "bad") / "recipe.yaml").write_bytes(b"\xff{")
    rows = {row.folder.name: row for row in list_runs(tmp_path)}
    assert rows["bad"].state == "unreadable" and "cannot be read" in rows["bad"].best and rows["good"].state == "new"
    done = subprocess.run([sys.executable, "-m", "lemma", "runs", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0 and "unreadable" in done.stdout and "good" in done.stdout


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n" for number in range(1, 9)
)


@pytest.mark.parametrize(
    "recipe",
    ["[" * 20_000, "\n".join(" " * depth + "a:" for depth in range(1200)), LAUGHS + "stages: {sft: *a8}",
     "stages: &s {sft: *s}", "stages: {1: {}, 2: {}}"],
    ids=["brackets", "depth", "aliases", "circle", "numbers"],
)  # fmt: skip
def test_recipes_that_nobody_would_write_do_not_hide_the_others(tmp_path: Path, recipe: str) -> None:
    """Nested, expanding to any size, within themselves, with stages that have no names."""
    make_run(tmp_path / "good")
    bad = make_run(tmp_path / "bad")
    (bad / "recipe.yaml").write_text(recipe)
    (bad / "stages" / "sft").mkdir()
    (bad / "stages" / "sft" / "done.json").write_text("{}")
    rows = {row.folder.name: row for row in list_runs(tmp_path)}
    assert rows["good"].state == "new" and len(rows) == 2
    folder = RunFolder(bad)
    with pytest.raises(UserError, match="holds a run of another recipe"):
        folder.begin("stages: {sft: {}}", "another", 1, fresh=())
    folder.close()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "run.log", "stages/sft/journal/step-000001.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_read_without_end_does_not_hide_the_others(tmp_path: Path, name: str, kind: str) -> None:
    make_run(tmp_path / "good")
    path = make_run(tmp_path / "bad") / name
    path.parent.mkdir(exist_ok=True, parents=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    rows = {row.folder.name: row for row in list_runs(tmp_path)}
    assert rows["bad"].state == "unreadable" and "is not a file" in rows["bad"].best and rows["good"].state == "new"
    with pytest.warns(LemmaWarning, match="bad is left as it is"):
        assert find_spare(tmp_path) == []


def test_odd_contents_are_damage(tmp_path: Path) -> None:
    """Of any depth, and of other kinds than a run writes."""
    nested = make_run(tmp_path / "nested")
    for name in ("run.json", "metrics.jsonl"):
        (nested / name).write_text("[" * 200_000 + "\n")
    checkpoints = make_run(tmp_path / "odd") / "stages" / "sft" / "checkpoints"
    for name in ("step-x", "step-000002"):
        (checkpoints / name).mkdir(parents=True)
    (checkpoints / "best.json").write_text("[1]")
    assert [row.state for row in list_runs(tmp_path)] != []
    with pytest.warns(LemmaWarning, match="odd is left as it is"):
        assert find_spare(tmp_path) == []
    with pytest.raises(UserError, match=r"run\.json is broken"):
        RunFolder(nested, only_read=True).facts()
    assert RunReader(nested).facts == {}


@pytest.mark.parametrize("field", ["sample", "problem", "key", "turns", "reward"])
@pytest.mark.parametrize("value", ["x", {"a": []}, None])
def test_a_report_leaves_out_samples_of_another_form(tmp_path: Path, field: str, value: Any) -> None:
    run = small_run(tmp_path / "run", steps=2)
    journal = run / "stages" / "grpo" / "journal" / "step-000001.jsonl"
    first, *others = journal.read_text().splitlines()
    journal.write_text("\n".join([json.dumps(json.loads(first) | {field: value}), *others]) + "\n")
    written = write_report(open_runs([run]), ["words"], tmp_path / "report.html", 5)
    assert 1 <= written.chunks <= written.chunks_there == 2
