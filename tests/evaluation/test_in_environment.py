"""Problems that are played: success without what is unknown, an environment's own problems and measures, turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lemma
from lemma.cli import main
from lemma.evaluation.intervals import exact_binomial
from lemma.evaluation.results import read_report
from lemma.recipe import Recipe
from lemma.reports.run_reader import EvaluationPlace
from lemma.reports.shown_evaluations import evaluation_rows
from lemma.reports.shown_samples import read_evaluation_chunk
from lemma.runs.run import train

# Task n ends after n turns. Even tasks succeed, task 5 cannot be scored; two tasks make a scenario.
STAIRS = """
from lemma.core.types import Message, Problem
from lemma.environments import Environment, EnvironmentOptions, Outcome, Observation


class Climb(Environment):
    def reset(self, problem, seed):
        self.number, self.turns = int(problem.id), 0
        return [Message("user", "how many steps ?")]

    def step(self, said):
        self.turns += 1
        return Observation(f"step {self.turns}", done=self.turns == self.number)

    def score(self):
        if self.number == 5:
            return Outcome(None, None, "the stairs are gone")
        return Outcome(0.5, self.number % 2 == 0)


class Stairs(EnvironmentOptions):
    turns: int = 4

    def make(self):
        return Climb()

    def problems(self, split):
        if split != "dev":
            return None
        return [Problem((Message("user", "climb"),), id=str(n), level=str((n - 1) // 2)) for n in range(1, 7)]

    def summarise(self, attempts):
        scenarios = {}
        for one in attempts:
            if one.success is not None:
                scenarios.setdefault((one.problem.level, one.sample), []).append(one.success)
        return {"scenarios": [float(all(own)) for own in scenarios.values()], "nothing": []}
"""
QUICK = ("--max-tokens", "3", "--device", "cpu", "--format", "r1_zero")


@pytest.fixture(scope="module")
def stairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("stairs") / "stairs.py"
    path.write_text(STAIRS)
    return f"{path}:Stairs"


@pytest.fixture(scope="module")
def played(stairs: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("played") / "out"
    assert main(["eval", "tiny", "--environment", stairs, "--to", str(out), *QUICK]) == 0
    return out


def test_success_leaves_out_what_is_unknown_and_counts_it(played: Path) -> None:
    report = read_report(played)
    summary = report.summaries["Stairs"]
    label, score = report.headline("Stairs")
    assert (label, score.value) == ("success", 3 / 5)
    assert (score.low, score.high) == tuple(exact_binomial(3, 5))[:2]
    assert (summary.n, summary.unknown) == (6, 1)
    assert {row.problem: row.verdict for row in report.rows["Stairs"]} == {
        "1": "wrong", "2": "right", "3": "wrong", "4": "right", "5": "unknown", "6": "right"
    }  # fmt: skip
    assert summary.levels["2"][0] == 1, "of problems 5 and 6, one counts"
    assert summary.numbers["turns"] == (1 + 2 + 3 + 4 + 4 + 4) / 6 and summary.numbers["reward"] == 0.5


def test_measures_of_the_environment_have_intervals_and_survive_on_disk(played: Path) -> None:
    results = json.loads((played / "results.json").read_text())["benchmarks"]["Stairs"]
    # Scenario 2 is tasks 5 and 6: 5 is unknown, 6 succeeds.
    assert results["measures"] == ["scenarios"]
    assert results["scores"]["scenarios"] == {"value": 1 / 3, **exact_binomial(1, 3)._asdict()}
    assert read_report(played).summaries["Stairs"].scores["scenarios"].value == 1 / 3
    table = (played / "results.md").read_text()
    assert "| Stairs | scenarios | 33.3 |" in table and "environment" in table and "at most 4 turns" in table


def test_samples_and_report_show_every_turn(played: Path) -> None:
    rows = {row.problem: row for row in read_report(played).rows["Stairs"]}
    assert rows["3"].turns is not None and rows["3"].prompt.count("how many steps ?") == 1
    assert [turn["heard"] for turn in rows["3"].turns] == ["step 1", "step 2", "step 3"]
    assert rows["3"].completion == rows["3"].turns[-1]["said"]
    assert rows["3"].tokens == sum(turn["tokens"] for turn in rows["3"].turns)
    parts = next(one["parts"] for one in read_evaluation_chunk(played)["samples"] if one["problem"] == "3")
    assert [part["kind"] for part in parts] == ["sampled", "observation"] * 3
    shown = evaluation_rows(EvaluationPlace("played", played))
    assert [(row["metric"], row["value"], row["turns"]) for row in shown] == [
        ("success", 3 / 5, 3.0), ("scenarios", 1 / 3, 3.0)
    ]  # fmt: skip


def test_a_finished_evaluation_is_read_and_no_grader_judges_it(
    stairs: str, played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (played / "samples.jsonl").stat().st_mtime_ns
    assert main(["eval", "tiny", "--environment", stairs, "--to", str(played), *QUICK]) == 0
    assert (played / "samples.jsonl").stat().st_mtime_ns == before
    assert main(["eval", "--rescore", str(played)]) == 2
    assert "are those of an environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--environment", "higher_lowr"], "did you mean 'higher_lower'?"),
        (["--environment", "single_turn"], "single_turn is no environment to play in"),
        (["--environment", "absent.yaml"], "there is no file absent.yaml"),
        (["--environment", "higher_lower"], "environment higher_lower has no problems of its own in split 'dev'"),
        (["--environment", "STAIRS", "--split", "test"], "has no problems of its own in split 'test'"),
        (["--environment", "STAIRS", "--likelihood"], "--likelihood has no effect in an environment"),
        (["--environment", "STAIRS", "--grader", "boxed_fast"], "--grader has no effect in an environment"),
        (["--benchmarks", "environment"], "wants the problems of an environment, and there is none"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(
    stairs: str, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "tiny", *(stairs if one == "STAIRS" else one for one in arguments)]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said and "\n" not in said


def test_benchmarks_are_played_with_several_samples_from_python(tmp_path: Path) -> None:
    rows = [{"question": "how many ?", "answer": str(number)} for number in (3, 5)]
    (tmp_path / "secrets.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "game.yaml").write_text("name: higher_lower\nturns: 3\n")
    found = lemma.evaluate(
        "tiny", str(tmp_path / "secrets.jsonl"), environment=str(tmp_path / "game.yaml"), samples=2, temperature=1.0,
        max_tokens=1, format="r1_zero", device="cpu", out=tmp_path / "out",
    )  # fmt: skip
    summary = found.report.summaries["secrets"]
    assert (summary.n, summary.k) == (2, 2) and {"avg@2", "pass@2"} <= set(summary.scores)
    assert not any(name.startswith("maj@") for name in summary.scores), "turns are no answers to vote for"
    for row in found.report.rows["secrets"]:
        assert row.turns is not None and 1 <= len(row.turns) <= 3
        assert (row.verdict == "right") == (row.turns[-1]["heard"] == "right")


def test_a_stage_measures_in_its_environment(stairs: str, tmp_path: Path) -> None:
    stage: dict[str, Any] = {
        "kind": "rl", "algorithm": {"name": "grpo", "group_size": 2},
        "environment": {"name": stairs, "unknown_limit": 1.0},
        "data": {"source": "environment", "split": "dev"}, "rollout": {"max_tokens": 2}, "batch": {"problems": 2},
        "steps": 1, "validation": {"share": 0.4},
        "eval": {"benchmarks": [{"source": "environment", "split": "dev"}], "max_tokens": 2, "metric": "success"},
    }  # fmt: skip
    recipe = {
        "run": {"dir": str(tmp_path / "run"), "threads": 1, "tensorboard": False, "device": "cpu"},
        "model": {"tiny": {"hidden": 32, "layers": 1, "feed_forward": 32, "heads": 2, "kv_heads": 1}},
        "format": "r1_zero", "stages": {"rl": stage},
    }  # fmt: skip
    assert train(Recipe.model_validate(recipe), sink=lambda event: None) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["axis"] == "eval"]
    held_out = [row["evaluation/validation/turns"] for row in measured if "evaluation/validation/turns" in row]
    assert len(held_out) == 2 and held_out[0] == held_out[1] > 1
    measured = [row for row in measured if "evaluation/environment/turns" in row]
    assert [row["step"] for row in measured] == [0, 1]
    for row in measured:
        assert row["evaluation/environment/answer_accuracy"] == 3 / 5
        assert row["evaluation/environment/scenarios"] == 1 / 3
        assert row["evaluation/environment/turns"] == 3.0 and row["evaluation/environment/unknown"] == 1 / 6


PLAIN = """
from lemma.core.types import Message, Problem
from lemma.environments import Environment, Outcome, Observation


class Patience(Environment):
    turns = 0

    @staticmethod
    def problems(split):
        return [Problem((Message("user", "wait"),), (str(n),)) for n in (1, 3)]

    @staticmethod
    def summarise(attempts):
        return {"at once": [float(one.turns == 1) for one in attempts]}

    def reset(self, problem, seed):
        self.wanted = int(problem.gold)
        return []

    def step(self, said):
        self.turns += 1
        return Observation("wait", done=self.turns == self.wanted)

    def score(self):
        return Outcome(1.0, True)
"""


def test_a_plain_class_brings_problems_and_measures_and_plays_in_workers(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    found = lemma.evaluate(
        "tiny", environment=f"{tmp_path / 'plain.py'}:Patience", max_tokens=1, format="r1_zero", device="cpu",
        out=tmp_path / "out",
    )  # fmt: skip
    summary = found.report.summaries["Patience"]
    assert found["Patience"].value == 1.0 and summary.unknown == 0
    assert summary.numbers["turns"] == 2.0 and summary.scores["at once"].value == 0.5
