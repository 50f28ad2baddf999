"""Two evaluations on the same problems: numbers by hand and by brute force, power and false alarms, and the command."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.cli import main
from lemma.core.errors import UserError
from lemma.core.random import stream
from lemma.evaluation.comparison import EvalResult, Sampled, compare, read_evaluation
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.paired import (
    holm,
    interval,
    paired_mean,
    paired_test,
    sign_flip_drawn,
    sign_flip_exact,
    t_quantile,
)
from lemma.evaluation.results import VERSION, make_report, read_report, write_report


def enumerated(d: np.ndarray) -> float:
    """The sign-flip test by trying every pattern of signs."""
    observed = abs(d.sum()) - 1e-9
    return float(np.mean([abs(np.dot(signs, d)) >= observed for signs in product((-1, 1), repeat=len(d))]))


def test_mcnemar_by_hand() -> None:
    """10 gained, 2 lost: 2 (C(12,10) + C(12,11) + C(12,12)) / 2^12 = 158 / 4096."""
    a = [[0.0]] * 10 + [[1.0]] * 2 + [[1.0]] * 50 + [[0.0]] * 38
    b = [[1.0]] * 10 + [[0.0]] * 2 + [[1.0]] * 50 + [[0.0]] * 38
    test = paired_test(a, b)
    assert test.p == pytest.approx(158 / 4096)
    assert (test.first, test.second, test.gained, test.lost, test.problems) == (0.52, 0.6, 10, 2, 100)
    assert test.difference == pytest.approx(0.08)
    # Agresti and Min: 8 / 102, and ((12 + 1) / 102 - (8 / 102)^2) / 102 under the root, times Student's 1.9837.
    middle, half = 8 / 102, 1.9837 * np.sqrt((13 / 102 - (8 / 102) ** 2) / 102)
    assert (test.low, test.high) == (pytest.approx(middle - half, abs=1e-5), pytest.approx(middle + half, abs=1e-5))
    assert test.differs


@pytest.mark.parametrize(("k_a", "k_b"), [(1, 1), (2, 2), (2, 3), (4, 1), (8, 8)])
def test_exact_p_values_are_those_of_all_sign_patterns(k_a: int, k_b: int) -> None:
    random = stream(0, "signs", k_a, k_b)
    for count in (1, 2, 5, 9, 12):
        a, b = random.integers(0, 2, (count, k_a)).astype(float), random.integers(0, 2, (count, k_b)).astype(float)
        d = b.mean(axis=1) - a.mean(axis=1)
        assert paired_test(a.tolist(), b.tolist()).p == pytest.approx(enumerated(d))


def test_drawn_p_values_are_near_the_exact_ones() -> None:
    counts = stream(0, "drawn").integers(-3, 5, 60)
    assert sign_flip_drawn(counts.astype(float)) == pytest.approx(sign_flip_exact(counts), abs=0.01)


def test_samples_may_be_of_unequal_number() -> None:
    test = paired_test([[1, 0], [1], [0, 0, 1]], [[1, 1], [0], [1, 1, 1]])
    assert test.difference == pytest.approx((0.5 - 1 + 2 / 3) / 3)
    assert test.p == pytest.approx(enumerated(np.array([0.5, -1, 2 / 3])))


def test_no_difference_at_all_is_not_certainty() -> None:
    test = paired_test([[1.0]] * 30, [[1.0]] * 30)
    assert test.p == 1.0 and not test.differs
    assert -0.1 < test.low < -0.02 and 0.02 < test.high < 0.1


@pytest.mark.parametrize(("freedom", "expected"), [(5, 2.5706), (10, 2.2281), (30, 2.0423), (100, 1.9840)])
def test_students_quantile(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=1e-3)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5]) == [0.5] and holm([0.9, 0.8]) == [1.0, 1.0]


def draw(k: int, gain: float, *name: str | int, problems: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """Two models with independent samples; the second is right `gain` more often on every problem."""
    random = stream(0, "two models", k, *name)
    chance = random.beta(1, 1, problems) * (1 - gain)
    sides = [random.random((problems, k)) < (chance + extra)[:, None] for extra in (0.0, gain)]
    return sides[0].astype(float), sides[1].astype(float)


@pytest.mark.parametrize("k", [1, 4])
def test_false_alarms_are_rare(k: int) -> None:
    """Where there is no difference, at most 5% of 200 comparisons find one; the interval holds 0 in the others."""
    tests = [paired_test(*draw(k, 0.0, number)) for number in range(200)]  # type: ignore[arg-type]
    assert sum(test.differs for test in tests) <= 10
    assert 0.93 <= np.mean([test.low <= 0 <= test.high for test in tests]) <= 0.98


@pytest.mark.parametrize(("k", "least", "most"), [(1, 0.65, 0.95), (4, 0.95, 1.0)])
def test_five_points_on_a_thousand_problems_are_found(k: int, least: float, most: float) -> None:
    """Three comparisons of four with one sample a problem, nearly all with four; intervals cover the truth."""
    tests = [paired_test(*draw(k, 0.05, "gain", number)) for number in range(300)]  # type: ignore[arg-type]
    assert least <= np.mean([test.differs and test.difference > 0 for test in tests]) <= most
    assert np.mean([test.low <= 0.05 <= test.high for test in tests]) >= 0.9


def test_the_interval_covers_on_few_problems() -> None:
    random = stream(0, "coverage")
    covered = 0
    for _ in range(1000):
        chance = random.beta(0.5, 0.5, 30)
        sides = [(random.random((30, 4)) < chance[:, None]).mean(axis=1) for _ in range(2)]
        low, high, _ = interval(sides[1] - sides[0], 1 / 4)
        covered += low <= 0 <= high
    assert 930 <= covered <= 975


def test_the_mean_weighs_benchmarks_alike() -> None:
    small = ([[0.0]] * 10, [[1.0]] * 10)
    large = ([[0.0]] * 90, [[0.0]] * 90)
    test = paired_mean([small, large])
    assert (test.difference, test.problems, test.gained) == (pytest.approx(0.5), 100, 10)
    assert test.p == pytest.approx(2 / 1024, abs=0.002) and test.differs


def evaluation(scores: dict[str, list[list[float]]], golds: str = "7", **settings: Any) -> EvalResult:
    problems = {
        name: {f"p{n}": Sampled(f"Qp{n}?", (golds,), own) for n, own in enumerate(parts)}
        for name, parts in scores.items()
    }
    shared = {"format": {"name": "boxed"}, "max_tokens": 512, "seed": 0, **settings}
    return EvalResult("folder", problems, dict.fromkeys(problems, shared))


def test_words() -> None:
    worse, better = [[0.0]] * 60 + [[1.0]] * 40, [[0.0]] * 40 + [[1.0]] * 60
    (row,) = compare(evaluation({"m": worse}), evaluation({"m": better})).rows
    assert row.words.startswith("B is better by 20.0 points (95% interval 11.") and row.words.endswith("p < 0.001)")
    (row,) = compare(evaluation({"m": better}), evaluation({"m": worse})).rows
    assert row.words.startswith("A is better by 20.0 points (95% interval 11.")
    (row,) = compare(evaluation({"m": better}), evaluation({"m": better})).rows
    assert row.words.startswith("not different (B - A is +0.0 points, 95% interval -1.9 to +1.9, p = 1;")


def test_several_benchmarks_raise_the_bar() -> None:
    """Alone this is a difference (p 0.039); beside a second benchmark without any it is not."""
    a, b = [[0.0]] * 10 + [[1.0]] * 90, [[1.0]] * 10 + [[0.0]] * 2 + [[1.0]] * 88
    assert compare(evaluation({"m": a}), evaluation({"m": b})).rows[0].differs
    found = compare(evaluation({"m": a, "n": a}), evaluation({"m": b, "n": a}))
    assert not found.rows[0].differs and "not different among so many benchmarks" in found.rows[0].words
    assert found.mean is not None and found.mean.test.difference == pytest.approx(0.04)


def test_problems_gained_and_lost_are_listed() -> None:
    (row,) = compare(
        evaluation({"m": [[0, 0], [1, 1], [1, 0], [1, 1]]}), evaluation({"m": [[1, 1], [0, 1], [1, 0], [0, 0]]})
    ).rows
    assert [(c.problem, c.first, c.second) for c in row.changes] == [("p0", 0, 1), ("p1", 1, 0.5), ("p3", 1, 0)]


def test_other_problems_are_refused() -> None:
    with pytest.raises(UserError, match="share no problem: A has m and B has n"):
        compare(evaluation({"m": [[1.0]]}), evaluation({"n": [[1.0]]}))
    with pytest.raises(UserError, match="share no problem"):
        compare(evaluation({"m": [[1.0]]}), evaluation({"m": [[1.0]]}, golds="8"))
    with pytest.raises(UserError, match="no evaluation has a benchmark 'mm'; did you mean 'm'"):
        compare(evaluation({"m": [[1.0]]}), evaluation({"m": [[1.0]]}), ["mm"])


def test_problems_with_another_question_are_left_out() -> None:
    """The same ids and golds under other questions, as in two versions of a file."""
    first, second = evaluation({"m": [[1.0]] * 5}), evaluation({"m": [[1.0]] * 5})
    second.problems["m"]["p1"].question = second.problems["m"]["p4"].question = "Another?"
    found = compare(first, second)
    assert found.rows[0].test.problems == 3
    assert found.doubts == ("m: 2 problems have another question in B and are left out",)
    for one in second.problems["m"].values():
        one.question = "Another?"
    with pytest.raises(UserError, match="share no problem"):
        compare(first, second)


def test_doubts_are_said() -> None:
    first = evaluation({"m": [[1.0]] * 5, "n": [[1.0]]}, max_tokens=512, format={"name": "boxed"})
    second = evaluation({"m": [[1.0]] * 3}, max_tokens=4096, format={"name": "r1_zero"}, seed=7)
    assert compare(first, second).doubts == (
        "format.name differs: boxed in A, r1_zero in B (m)",
        "max_tokens differs: 512 in A, 4096 in B (m)",
        "m: only 3 problems are in both (A has 5, B has 3)",
        "n is left out: it is not in both evaluations",
    )


@pytest.mark.parametrize("n", [5, 3])
def test_another_chat_template_is_a_doubt_whatever_the_number_of_problems(n: int) -> None:
    """The hash is over the format and what it makes of one example, not over the problems."""
    first, second = (
        evaluation({"m": [[1.0]] * count}, format_hash=mark, n=count) for count, mark in ((5, "aa"), (n, "bb"))
    )
    assert compare(first, second).doubts[0] == "format_hash differs: aa in A, bb in B (m)"


def write(folder: Path, right: np.ndarray, unknown: int = 0, **more: Any) -> Path:
    """An evaluation on disk, as `lemma eval` leaves it; the last problems are `unknown`."""
    settings = {
        "n": right.shape[0], "k": right.shape[1], "metric": "avg", "ties": "average", "seed": 0,
        "temperature": 0.6, "top_p": 1.0, "max_tokens": 256,
        "format": {"name": "boxed"}, "format_hash": "f", "grader": "1", "engine": "native", **more,
    }  # fmt: skip
    made: dict[str, Any] = {
        "question": "q",
        "prompt": "q",
        "completion": "c",
        "extracted": "7",
        "gold": ["7"],
        "reason": "number",
    }
    made |= {"faults": [], "finish": "stop", "tokens": 9, "reasoning": None}
    rows = [
        EvalRow("made", f"p{n}", k, verdict="right" if one else "wrong", format_ok=bool(one), **made)
        for n, own in enumerate(right)
        for k, one in enumerate(own)
    ]
    for row in rows[len(rows) - unknown * right.shape[1] :] if unknown else ():
        row.verdict = "unknown"
    folder.mkdir()
    whole = {"version": VERSION, "model": {"name": folder.name}, "benchmarks": {"made": settings}}
    (folder / "settings.json").write_text(json.dumps(whole))
    write_report(folder, make_report({"name": folder.name}, {"made": settings}, {"made": rows}))
    return folder


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = draw(4, 0.2, "command", problems=300)
    first, second = write(tmp_path / "a", a), write(tmp_path / "b", b[:, :2], max_tokens=512)
    out = tmp_path / "compared.json"
    assert main(["compare", str(first), str(second), "--show", "2", "--json", str(out)]) == 0
    said = capsys.readouterr()
    assert "made: B is better by" in said.out and "on 300 problems; B gains" in said.out
    assert said.out.count("\ngained p") == 2 and said.out.count("\nlost p") == 2
    assert said.out.count("    question:\n        q\n") == 4 and "the answer is 7" in said.out
    shown = said.out.split("\ngained p", 1)[1].split("\nlost")[0]
    assert "    A, wrong, read as 7:\n        c\n    B, right, read as 7:\n        c" in shown
    assert "max_tokens differs: 256 in A, 512 in B (made)" in said.err
    found = json.loads(out.read_text())
    assert found["rows"][0]["differs"] and found["rows"][0]["test"]["difference"] == pytest.approx(
        b[:, :2].mean() - a.mean()
    )


def test_episodes_that_no_environment_could_score_are_left_out(tmp_path: Path) -> None:
    """A succeeds wherever it was scored, on 12 of 20 problems; B on 9 of 10."""
    all_right = np.ones((20, 1))
    b = np.array([[0.0]] * 2 + [[1.0]] * 18)
    first, second = (
        write(tmp_path / name, right, unknown=unknown, scoring="environment")
        for name, right, unknown in (("a", all_right, 8), ("b", b, 0))
    )
    assert read_report(first).summaries["made"].accuracy.value == 1.0
    found = compare(read_evaluation(first), read_evaluation(second))
    (row,) = found.rows
    assert (row.test.problems, row.test.first) == (12, 1.0)
    assert row.test.second == pytest.approx(10 / 12) and row.test.p == 0.5
    assert any("could not score 8 episodes of A and 0 of B" in doubt for doubt in found.doubts)
    cut = compare(read_evaluation(first, "finished"), read_evaluation(second, "finished")).rows
    assert cut[0].test.problems == 20


def test_the_command_refuses_what_is_no_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "holds no evaluation" in capsys.readouterr().err
    made = write(tmp_path / "a", np.ones((3, 1)))
    assert main(["compare", str(made), str(made), "--benchmarks", "made, "]) == 0
    assert main(["compare", str(made), str(made), "--benchmarks", "mad"]) == 2
    assert "did you mean 'made'?" in capsys.readouterr().err
    problems = read_evaluation(made, "format").problems["made"]
    assert {name: one.scores for name, one in problems.items()} == {"p0": [1.0], "p1": [1.0], "p2": [1.0]}


def test_a_file_that_lost_samples_gives_no_numbers_over_fewer_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write(tmp_path / "a", np.ones((3, 2)))
    samples = made / "samples.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    for kept in (lines[:5], lines[:4], lines + lines[:1]):
        samples.write_text("".join(kept))
        assert main(["compare", str(made), str(made)]) == 2
        assert f"holds {len(kept)} samples of made, not 2 of each of 3 problems" in capsys.readouterr().err
    for broken in ("{nothing\n", '{"benchmark": "made"}\n', "[1]\n"):
        samples.write_text("".join([lines[0], broken]))
        assert main(["compare", str(made), str(made)]) == 2
        assert f"{samples}:2: this sample cannot be read" in capsys.readouterr().err


def test_where_results_cannot_be_written_one_sentence_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write(tmp_path / "a", np.ones((3, 1)))
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file" / "x.json", made):
        assert main(["compare", str(made), str(made), "--json", str(place)]) == 2
        assert capsys.readouterr().err.startswith("lemma: error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"], "nothing is left half written"
    assert (tmp_path / "file").read_text() == "mine"
