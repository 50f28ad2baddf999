"""The built-in task from model to table, twice, rescored, killed; and the same code during training."""

from __future__ import annotations

import csv
import fcntl
import gc
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lemma.cli import main
from lemma.core.errors import UserError
from lemma.core.events import Event, Progressed
from lemma.engines import open_engine
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Completion, Request
from lemma.evaluation.eval_settings import EvalOptions
from lemma.evaluation.evaluator import EvalSettings, evaluate
from lemma.evaluation.rescore import rescore
from lemma.evaluation.results import VERSION, claim, read_report
from lemma.grading import GradingService, grade
from tests.core.disk_calls import disk_calls
from tests.evaluation.conftest import ENTRY
from tests.preloaded import Python
from tests.rollouts.scripted import Scripted

FORMAT = {"name": "r1_zero", "preamble": False}
FILES = ["results.json", "results.csv", "results.md", "samples.jsonl", "questions.csv", "settings.json"]


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("entries") / "sums.yaml"
    path.write_text(yaml.safe_dump(ENTRY))
    return str(path)


def command(trained: Path, entry: str, out: Path) -> list[str]:
    return ["eval", str(trained), "--benchmarks", entry, "--samples", "4", "--temperature", "1", "--max-tokens", "24",
            "--seed", "7", "--device", "cpu", "--to", str(out)]  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(trained: Path, entry: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluated") / "whole"
    assert main(command(trained, entry, out)) == 0
    return out


def test_the_built_in_task_from_model_to_table(evaluated: Path, trained: Path) -> None:
    results = json.loads((evaluated / "results.json").read_text())
    sums = results["benchmarks"]["sums"]
    assert (sums["n"], sums["k"], sums["unknown"]) == (60, 4, 0)
    assert set(sums["scores"]) == {
        "avg@4", "pass@2", "pass@4", "maj@2", "maj@4", "lenient", "format", "truncated", "reasoning",
    }  # fmt: skip
    assert sums["scores"]["format"]["value"] > 0.5, "the format was learnt"
    assert 0 < sums["scores"]["avg@4"]["value"] <= sums["scores"]["pass@4"]["value"] < 1
    for score in sums["scores"].values():
        assert 0 <= score["low"] <= score["value"] <= score["high"] <= 1
    wanted = {"n", "k", "temperature", "top_p", "max_tokens", "format", "format_hash", "grader", "engine", "seed"}
    assert wanted <= set(sums["settings"])
    assert sums["settings"]["format"]["preamble"] is False, "the format is the run's own"
    assert results["model"]["name"].startswith(str(trained)) and results["model"]["weights"]
    samples = [json.loads(line) for line in (evaluated / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 240 and not (evaluated / "journal.jsonl").exists()
    for row in samples:
        said = row["extracted"]
        assert row["verdict"] == ("right" if said and any(grade(said, gold).right for gold in row["gold"]) else "wrong")
        assert row["prompt"].startswith("User: ") and (row["reasoning"] or "") in row["completion"]
    right = sum(row["verdict"] == "right" for row in samples) / 240
    assert sums["scores"]["avg@4"]["value"] == pytest.approx(right)
    with open(evaluated / "questions.csv", newline="") as handle:
        lines = list(csv.DictReader(handle))
    assert [line["is_correct"] for line in lines] == [str(row["verdict"] == "right") for row in samples]
    table = (evaluated / "results.md").read_text()
    assert f"| sums | avg@4 | {100 * right:.1f} |" in table and "format r1_zero" in table and "seed 7" in table


def test_reading_a_report_gives_the_same_numbers(evaluated: Path) -> None:
    from lemma.evaluation.results import as_json

    assert json.loads(json.dumps(as_json(read_report(evaluated)))) == json.loads(
        (evaluated / "results.json").read_text()
    )


def start(arguments: list[str], fault: str = "") -> Python:
    environment = os.environ | {"LEMMA_FAULT": fault, "OMP_NUM_THREADS": "1"}
    return Python(["-m", "lemma", *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_killed_five_times_and_never_killed_give_the_same_files(
    trained: Path, entry: str, evaluated: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    faults = ["jsonl.mid_line:20", "rollouts.sampled:150", "jsonl.mid_line:70", "rollouts.generated:1",
              "evaluation.before_results:1"]  # fmt: skip
    journalled = [0]
    for fault in faults:
        assert start(command(trained, entry, out), fault).wait(500) == -signal.SIGKILL, fault
        journal = out / "journal.jsonl"
        journalled.append(journal.read_bytes().count(b"\n"))
        assert not (out / "results.json").exists()
    assert journalled == sorted(journalled) and 0 < journalled[1] < journalled[3] < journalled[-1] == 240
    assert main(command(trained, entry, out)) == 0
    for name in FILES:
        assert (out / name).read_bytes() == (evaluated / name).read_bytes(), name


def test_nothing_is_synced_that_the_results_replace(trained: Path, entry: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with disk_calls(out) as calls:
        assert main([*command(trained, entry, out), "--limit", "3"]) == 0
    assert calls[:3] == ["sync settings.json", "name settings.json", "sync folder"]
    assert "sync journal.jsonl" not in calls
    assert calls[-2:] == ["name results.json", "sync folder"] and not (out / "journal.jsonl").exists()
    assert sum(call.startswith("sync ") for call in calls[3:]) == len(FILES) - 1 + len(["timings", "folder", "folder"])


def test_a_kill_at_any_instant_loses_nothing_that_was_graded(trained: Path, entry: str, tmp_path: Path) -> None:
    process = start(command(trained, entry, tmp_path / "out"))
    journal = tmp_path / "out" / "journal.jsonl"
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") >= 3):
        time.sleep(0.001)
    process.kill()
    process.wait(500)
    done = journal.read_bytes().count(b"\n") if journal.exists() else 240
    policy, engine = open_engine(str(trained), "cpu", 7, options=NativeOptions())
    heard: list[Event] = []
    settings = EvalSettings(samples=4, temperature=1.0, max_tokens=24, seed=7, format=FORMAT)
    model = json.loads((tmp_path / "out" / "settings.json").read_text())["model"]["name"]
    report = evaluate(engine, policy, [entry], settings, tmp_path / "out", model=model, sink=heard.append)
    assert report.summaries["sums"].n == 60
    if done < 240:
        assert any(f"{done} of 240 samples are there already" in str(event) for event in heard)
        assert any(isinstance(event, Progressed) and event.done == 240 for event in heard)


def test_rescoring_needs_no_model(evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--rescore", str(evaluated), "--to", str(tmp_path / "ours")]) == 0
    assert "sums: 0 of 240 verdicts are different now" in capsys.readouterr().err
    for name in ("results.json", "samples.jsonl", "results.md"):
        assert (tmp_path / "ours" / name).read_bytes() == (evaluated / name).read_bytes()


def test_other_graders_judge_saved_samples_and_new_ones(trained: Path, evaluated: Path, tmp_path: Path) -> None:
    with GradingService() as service:
        before, after, folder = rescore(evaluated, "r1_zero_fast", tmp_path / "theirs", service=service)
        both = rescore(evaluated, "boxed_fast,r1_zero_fast", tmp_path / "both", service=service)[1]
        policy, engine = open_engine(str(trained), "cpu")
        settings = EvalSettings(limit=30, max_tokens=24, format=FORMAT, grader="boxed_fast")
        boxed = evaluate(engine, policy, [ENTRY], settings, tmp_path / "boxed", service=service)
    ours, theirs = before.summaries["sums"].accuracy.value, after.summaries["sums"].accuracy.value
    assert 0 < theirs <= ours, "theirs wants exactly one space between the tags"
    assert (
        after.settings["sums"]["grader"].startswith("r1_zero_fast ")
        and read_report(folder).summaries == after.summaries
    )
    assert both.summaries["sums"].accuracy.value == theirs
    assert boxed.summaries["sums"].accuracy.value == 0.0, "no answer is in a box"
    assert {row.reason for row in boxed.rows["sums"]} <= {"boxed_fast", "no_answer"}


def test_training_evaluates_at_the_start_on_the_way_and_at_the_end(trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row for row in rows if row["axis"] == "eval"}
    assert list(found) == [0, 30, 60]
    five = ("answer_accuracy", "format_accuracy", "reasoning_present", "reasoning_length", "reward")
    for row in found.values():
        assert all(f"evaluation/sums/{name}" in row for name in five)
    form = {step: row["evaluation/sums/format_accuracy"] for step, row in found.items()}
    assert form[0] == 0 and form[60] > 0.9
    best = json.loads(next((trained / "stages" / "sft" / "checkpoints").glob("best*")).read_text())
    first = 30 if form[30] >= form[60] else 60
    assert best == {"step": first, "score": form[first], "metric": "format_accuracy"}
    for step in found:
        report = read_report(trained / "evaluations" / "sft" / f"step-{step:06d}")
        assert report.summaries["sums"].scores["format"].value == form[step]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is no model to evaluate; write `lemma eval MODEL --benchmarks gsm8k`"),
        (["tiny"], "no benchmark is named; write for example"),
        (["tiny", "--benchmarks", "gsm"], "there is no benchmark 'gsm'; did you mean 'gsm8k'?"),
        (["tiny", "--benchmarks", "arithmetic,arithmetic"], "benchmark arithmetic is named twice"),
        (["tiny", "--benchmarks", "arithmetic", "--samples", "0"], "--samples is 0; write 1 or more"),
        (["tiny", "--benchmarks", "arithmetic", "--top-p", "0"], "--top-p is 0.0; write a number above 0"),
        (["tiny", "--benchmarks", "arithmetic", "--format", "boxd"], "there is no format 'boxd'; did you mean"),
        (["tiny", "--benchmarks", "arithmetic", "--grader", "boxed"], "there is no grader 'boxed'; did you mean"),
        (["tiny", "--benchmarks", "amc", "--data-dir", "absent"], "the folder absent does not exist"),
        (["./absent", "--benchmarks", "arithmetic"], "there is no model folder ./absent"),
        (["tiny", "--rescore", "x"], "--rescore grades saved samples and takes no model"),
        (["--rescore", "absent"], "absent holds no evaluation; give the folder that `lemma eval` wrote"),
        (["tiny", "--benchmarks", "arithmetic", "--sample", "2"], "`lemma eval` has no option --sample; did you mean"),
    ],
)  # fmt: skip
def test_wrong_arguments_get_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"lemma: error: {sentence}") and "\n" not in said


def test_rescoring_takes_only_what_it_uses(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "samples": "2", "temperature": "1", "top-p": "1", "max-tokens": "9", "format": "qwen", "thinking": "after",
        "limit": "3", "seed": "0", "data-dir": "x", "device": "auto", "engine": "native",
    }  # fmt: skip
    for name, value in given.items():
        assert main(["eval", "--rescore", str(evaluated), f"--{name}", value]) == 2
        said = capsys.readouterr().err.strip()
        assert f"--{name} would change nothing; leave --{name} out; only --grader" in said and "\n" not in said


def test_another_evaluation_is_never_overwritten(
    evaluated: Path, trained: Path, entry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(trained, entry, evaluated), "--max-tokens", "25"]) == 2
    assert "(benchmarks.sums.max_tokens was 24, is 25)" in capsys.readouterr().err
    (tmp_path / "letter.txt").write_text("dear")
    assert main(command(trained, entry, tmp_path)) == 2
    assert "holds something other than an evaluation" in capsys.readouterr().err


def test_a_kill_while_settings_are_written_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / ".settings.json.123.tmp").write_text('{"version"')
    claim(tmp_path, {"version": VERSION})
    assert json.loads((tmp_path / "settings.json").read_text()) == {"version": VERSION}
    claim(tmp_path, {"version": VERSION})


def test_two_processes_never_write_to_one_evaluation(trained: Path, tmp_path: Path) -> None:
    policy, engine = open_engine(str(trained), "cpu")
    settings = EvalSettings(limit=2, max_tokens=4, format=FORMAT)
    evaluate(engine, policy, [ENTRY], settings, tmp_path / "out")
    with open(tmp_path / "out" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is working in"):
            evaluate(engine, policy, [ENTRY], settings, tmp_path / "out")


def test_the_collector_passes_over_all_that_was_there_before(trained: Path, tmp_path: Path) -> None:
    policy, engine = open_engine(str(trained), "cpu")
    frozen: set[bool] = set()
    gc.unfreeze()  # which the whole session is otherwise
    try:
        settings = EvalSettings(limit=2, max_tokens=24, format=FORMAT)
        evaluate(engine, policy, [ENTRY], settings, tmp_path, sink=lambda _: frozen.add(gc.get_freeze_count() > 0))
        assert frozen == {True} and not gc.get_freeze_count()
    finally:
        gc.freeze()


def test_prompts_that_do_not_fit_still_count(trained: Path, tmp_path: Path) -> None:
    rows = [
        {"question": "eva " * 3000 + "?", "answer": "3"},
        {"question": "eva has 3 pens . buys 2 . how many ?", "answer": "5"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy, engine = open_engine(str(trained), "cpu")
    settings = EvalSettings(max_tokens=24, format=FORMAT)
    heard: list[Event] = []
    report = evaluate(engine, policy, [str(tmp_path / "rows.jsonl")], settings, tmp_path / "out", sink=heard.append)
    first = report.rows["rows"][0]
    assert (first.verdict, first.reason, first.completion, report.summaries["rows"].n) == (
        "wrong",
        "prompt_too_long",
        "",
        2,
    )
    assert any("1 prompts do not fit into the model's context and count as wrong" in str(event) for event in heard)


def test_every_end_token_of_the_model_is_taken_off_the_text(trained: Path, tmp_path: Path) -> None:
    """The model's settings name a second token that ends a turn, as those of chat models do."""
    policy, _ = open_engine(str(trained), "cpu")
    tokenizer = policy.tokenizer
    second = tokenizer.convert_tokens_to_ids("####")
    policy.causal.generation_config.eos_token_id = [tokenizer.eos_token_id, second]

    class Ended(Scripted):
        def samples(self, request: Request) -> list[Completion]:
            return [
                replace(one, ids=np.array([*one.ids[:-1], second], dtype=np.int32)) for one in super().samples(request)
            ]

    (tmp_path / "rows.jsonl").write_text('{"question": "3 + 2 ?", "answer": "5"}\n')
    settings = EvalSettings(max_tokens=24, format=FORMAT)
    engine = Ended(tokenizer, lambda request, sample: "3 + 2 = 5 </think> <answer> 5 </answer>")
    report = evaluate(engine, policy, [str(tmp_path / "rows.jsonl")], settings, tmp_path / "out")
    (row,) = report.rows["rows"]
    assert row.completion == "3 + 2 = 5 </think> <answer> 5 </answer>"
    assert (row.verdict, row.faults, row.format_ok) == ("right", [], True)


def test_thoughts_that_never_end_count_only_on_request(trained: Path, tmp_path: Path) -> None:
    policy, engine = open_engine(str(trained), "cpu")
    for thinking, unfinished in (("after", False), ("whole", True)):
        settings = EvalSettings(limit=2, max_tokens=3, format=FORMAT, thinking=thinking)
        report = evaluate(engine, policy, [ENTRY], settings, tmp_path / thinking)
        assert report.settings["sums"]["format"]["grade_unfinished"] is unfinished
        assert all(row.finish == "length" and row.extracted is None for row in report.rows["sums"])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"benchmarks": ["gsm"]}, "there is no benchmark 'gsm'"),
        ({"benchmarks": ["gsm8k"], "metric": "loss"}, "there is no metric 'loss'"),
        ({"benchmarks": ["gsm8k"], "samples": 4, "temperature": 0}, "4 samples of gsm8k at temperature 0 are all"),
        ({"benchmarks": ["aime24"], "temperature": 0}, "32 samples of aime24 at temperature 0 are all the same"),
        ({"benchmarks": ["gsm8k"], "samples": 4, "metric": "maj@0"}, "there is no metric 'maj@0'"),
        ({"benchmarks": ["gsm8k"], "samples": 4, "metric": "aime24/pass@4"}, "there is no metric 'aime24/pass@4'"),
        ({"benchmarks": ["gsm8k"], "metric": "pass@4"}, "'pass@4', which is not measured .* raise `samples`, or write"),
        ({"benchmarks": ["gsm8k"], "samples": 4, "metric": "pass@3"}, "write pass@2, pass@4, or other `samples`"),
        ({"benchmarks": ["gsm8k"], "samples": 4, "metric": "maj@1"}, "write maj@2, maj@4, or other"),
        ({"benchmarks": ["gsm8k", "aime24"], "metric": "gsm8k/maj@4"}, "or write gsm8k/answer_accuracy"),
        ({"benchmarks": ["gsm8k", "gpqa_diamond"], "metric": "pass@8"}, "write pass@2, pass@4, or other"),
    ],
)
def test_wrong_options_of_a_stage(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EvalOptions.model_validate(values)


@pytest.mark.parametrize(
    ("values", "metric"),
    [
        ({"benchmarks": ["gsm8k", ENTRY], "metric": "gsm8k/pass@4", "samples": 4}, "gsm8k/pass@4"),
        ({"benchmarks": ["aime24"], "metric": "maj@16"}, "maj@16"),
        ({"benchmarks": ["gsm8k"], "metric": "pass@6", "samples": 6}, "pass@6"),
        ({"benchmarks": ["gsm8k"], "metric": "pass@1"}, "answer_accuracy"),
        ({"benchmarks": ["gsm8k", "aime24"], "metric": "aime24/pass@1"}, "aime24/answer_accuracy"),
        ({"benchmarks": [], "metric": "pass@4"}, "pass@4"),
    ],
)
def test_metrics_that_are_measured(values: dict[str, Any], metric: str) -> None:
    assert EvalOptions.model_validate(values).measured_metric == metric


@pytest.mark.parametrize(
    ("metric", "measured"),
    [("pass@1", "answer_accuracy"), ("sums/pass@2", "pass@2"), ("maj@2", "maj@2"), ("reward", "reward")],
)
def test_every_metric_that_the_options_allow_is_measured(
    metric: str, measured: str, trained: Path, tmp_path: Path
) -> None:
    from lemma.evaluation.during_training import StageEvaluator
    from lemma.formats import make_format

    policy, engine = open_engine(str(trained), "cpu")
    options = EvalOptions.model_validate(
        {"benchmarks": [ENTRY], "metric": metric, "limit": 10, "samples": 2, "max_tokens": 24}
    )
    evaluator = StageEvaluator(options, policy, make_format(FORMAT), tmp_path, name="stage x")
    assert [evaluator.is_due(step, 10) for step in (0, 5, 10)] == [True, False, True]
    values = evaluator.run(engine, 10)
    assert evaluator.score(values) == values[f"evaluation/sums/{measured}"] > 0
    evaluator.begin(10)
    assert (tmp_path / "step-000010").is_dir()
    evaluator.begin(9)
    assert not (tmp_path / "step-000010").exists()
