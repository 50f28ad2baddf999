"""Graders of other systems on saved samples: several gold answers, graders that fail, rewards, unfinished thoughts."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lemma.core.errors import UserError
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.questions import _fitted
from lemma.evaluation.rescore import regrade, rescore
from lemma.evaluation.results import VERSION, make_report, read_report, write_report
from lemma.formats import FORMATS, make_format
from lemma.grading import GradingService
from lemma.grading.compat import COMPAT

SETTINGS = {"format": {"name": "boxed"}, "rules": {}}


@pytest.fixture(scope="module")
def service() -> Iterator[GradingService]:
    with GradingService() as service:
        yield service


def row(completion: str, gold: list[str], verdict: str = "wrong") -> EvalRow:
    return EvalRow(
        benchmark="made", problem="p", sample=0, question="q", prompt="q", completion=completion, extracted=None,
        gold=gold, verdict=verdict, reason="", format_ok=False, faults=[], finish="stop", tokens=9, reasoning=None,
        reward=0.5,
    )  # fmt: skip


def made(folder: Path, model: str = "m") -> Path:
    """A finished evaluation of one problem."""
    settings = {
        "n": 1, "k": 1, "ties": "average", "seed": 0, "temperature": 0.0, "top_p": 1.0, "max_tokens": 9,
        "format": {"name": "boxed"}, "format_hash": "f", "grader": "lemma 0", "engine": "native", "metric": "avg",
        "rules": {},
    }  # fmt: skip
    whole = {"version": VERSION, "model": {"name": model}, "benchmarks": {"made": settings}}
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(whole))
    rows = {"made": [row(SAYS_SEVEN, ["7"], "right")]}
    write_report(folder, make_report(whole["model"], whole["benchmarks"], rows))  # type: ignore[arg-type]
    return folder


def test_rescoring_replaces_no_other_evaluation(tmp_path: Path, service: GradingService) -> None:
    mine, other = made(tmp_path / "mine"), made(tmp_path / "other", "another model")
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    with pytest.raises(UserError, match=r"holds another evaluation \(model.name was another model, is m\)"):
        rescore(mine, "lemma", other, service=service)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "samples.jsonl").write_text("dear")
    with pytest.raises(UserError, match="holds something other than an evaluation"):
        rescore(mine, "lemma", tmp_path / "letters", service=service)
    assert (tmp_path / "letters" / "samples.jsonl").read_text() == "dear"


def test_rescoring_again_into_its_own_folder(tmp_path: Path, service: GradingService) -> None:
    mine, out = made(tmp_path / "mine"), tmp_path / "out"
    for grader in ("lemma", "boxed_fast", "boxed_fast"):
        rescore(mine, grader, out, service=service)
        assert read_report(out).settings["made"]["grader"].startswith(f"{grader} ")
    assert read_report(mine).settings["made"]["grader"] == "lemma 0"
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is working in"):
            rescore(mine, "lemma", out, service=service)


SAYS_SEVEN = r"I think so.</think> The answer is $\boxed{7}$"


@pytest.mark.parametrize("name", ["luffy_v0", "luffy_v3", "luffy_v4", "verifier_math", "boxed_slow", "math_source"])
def test_any_of_several_golds_counts(name: str, service: GradingService) -> None:
    rows = [row(SAYS_SEVEN, ["5", "7"]), row(SAYS_SEVEN, ["5", "6"]), row(SAYS_SEVEN, ["7"]), row(SAYS_SEVEN, [])]
    found = regrade(rows, SETTINGS, name, service)
    assert [(one.verdict, one.reason) for one in found] == [
        ("right", name), ("wrong", name), ("right", name), ("unknown", "no_gold"),
    ]  # fmt: skip


def test_every_grader_takes_several_golds(service: GradingService) -> None:
    for name in COMPAT:
        (found,) = regrade([row(SAYS_SEVEN, ["5", "7"])], SETTINGS, name, service)
        assert found.verdict in ("right", "wrong") and found.reason == name, name


def test_a_grader_that_fails_says_nothing_about_the_others(service: GradingService) -> None:
    """This one takes the largest of the labels in a list, and a gold that is an empty list leaves none."""
    said = r"<finish>7</finish> \boxed{7}"
    rows = [row(said, ["[]"]), row(said, ["7"]), row(said, ["[]", "7"])]
    found = regrade(rows, SETTINGS, "verifier_re_search_f1", service)
    assert [one.verdict for one in found] == ["unknown", "right", "right"]
    assert found[0].reason == "verifier_re_search_f1 failed"


def test_rewards_stay_only_with_the_verdicts_that_they_came_from(service: GradingService) -> None:
    same, changed = row(SAYS_SEVEN, ["7"], "right"), row(SAYS_SEVEN, ["7"], "wrong")
    assert [one.reward for one in regrade([same, same], SETTINGS, "lemma", service)] == [0.5, 0.5]
    assert [one.reward for one in regrade([same, changed], SETTINGS, "lemma", service)] == [None, None]
    assert [one.reward for one in regrade([same, same], SETTINGS, "luffy_v4", service)] == [None, None]


NO_THOUGHTS = {"question_only", "alpaca", "prime_code"}
"""Formats that read the whole text whatever tags stand in it."""


@pytest.mark.parametrize("name", sorted({*FORMATS} - NO_THOUGHTS))
def test_an_answer_in_thoughts_that_never_end_is_found_on_request(name: str, service: GradingService) -> None:
    """The text opens thoughts, never closes them, and says 7 in the way of each format."""
    tags = {"working_out": ("<start_working_out>", "<SOLUTION>7</SOLUTION>"), "xml": ("<reasoning>", None)}
    opening, answer = tags.get(name, ("<think>", None))
    text = f"{opening} so {answer or chr(92) + 'boxed{7} <answer>7</answer>'}"
    found = {}
    for thinking in ("after", "whole"):
        fmt = _fitted(make_format(name), "Q:", thinking)
        settings = {"format": fmt.model_dump(mode="json"), "rules": {}}
        (found[thinking],) = regrade([row(text, ["7"])], settings, "lemma", service)
    assert (found["after"].verdict, found["after"].reason, found["after"].extracted) == ("wrong", "no_answer", None)
    assert (found["whole"].verdict, found["whole"].extracted) == ("right", "7")


def test_math_verify_wants_no_tags(service: GradingService) -> None:
    rows = [
        row(text, ["1/2"]) for text in (r"So $\boxed{\frac{1}{2}}$", "It is 0.5", "It is 5", r"x</think> $\frac12$")
    ]
    verdicts = {
        name: [one.verdict for one in regrade(rows, SETTINGS, name, service)] for name in ("math_verify", "luffy_v3")
    }
    assert verdicts["math_verify"] == ["right", "right", "wrong", "right"]
    assert verdicts["luffy_v3"] == ["wrong", "wrong", "wrong", "right"]
