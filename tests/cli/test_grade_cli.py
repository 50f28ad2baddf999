"""`lemma grade`: rows in, the same rows with verdicts out; wrong input gets one sentence and exit code 2."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from lemma.cli import main

ROWS = [
    {"prediction": "so \\boxed{1/2}", "gold": "0.5", "id": 1},
    {"prediction": "6", "gold": 5},
    {"prediction": "7", "gold": ["5", "7"]},
    {"prediction": "x", "gold": ""},
    {"prediction": "\\sum_{k=1}^{4} k", "gold": "10"},
]
VERDICTS = ["right", "wrong", "right", "unknown", "right"]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rows_come_back_with_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["grade", str(write(tmp_path / "in.jsonl", ROWS)), "--to", str(out)]) == 0
    graded = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["verdict"] for row in graded] == VERDICTS
    for row, original in zip(graded, ROWS, strict=True):
        assert {key: row[key] for key in original} == original
        assert set(row) - set(original) == {"verdict", "reason", "extracted", "seconds"}
    assert graded[0]["extracted"] == "1/2" and graded[3]["reason"] == "no_gold"
    summary = capsys.readouterr().err
    assert "5 answers" in summary and "60.0%" in summary


def test_rows_are_printed_without_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as handle:
        handle.writelines(json.dumps(row) + "\n" for row in ROWS[:3])
    assert main(["grade", str(path)]) == 0
    assert [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()] == VERDICTS[:3]


def test_other_columns_standard_input_and_tolerance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"response": "3.14", "answer": "3.141"}\n\n'))
    assert main(["grade", "-", "--prediction", "response", "--gold", "answer", "--relative", "0.01"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "right"


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        ("", [], "the file has no rows"),
        ("{", [], ":1: this line is not JSON"),
        ("[1]", [], ":1: this line is not an object"),
        ('{"prediction": "1", "gold": "1"}\n{"predicton": "1", "gold": "1"}', [], ":2: the row has no 'prediction'"),
        ('{"prediction": "1", "gold": {}}', [], ":1: 'gold' is not text"),
        ('{"prediction": "1", "gold": "1"}', ["--gold", "golds"], "did you mean 'gold'?"),
        ('{"prediction": "1", "gold": "1"}', ["--workers", "0"], "write 1 or more"),
        ('{"prediction": "1", "gold": "1"}', ["--relative", "-1"], "a tolerance is negative"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_sentence(
    content: str, arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(content, encoding="utf-8")
    assert main(["grade", str(path), "--to", str(out), *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.strip().splitlines()) == 1
    assert not out.exists()


def test_missing_and_broken_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(b"no gzip")
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, sentence in ((tmp_path / "x", "there is no file"), (broken, "not gzip"), (binary, "not UTF-8")):
        assert main(["grade", str(path)]) == 2
        assert sentence in capsys.readouterr().err


def test_deep_nesting_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    for depth in (500, 900, 5_000, 200_000):
        path.write_text(f'{{"prediction": "1", "gold": "1", "more": {"[" * depth}{"]" * depth}}}\n', encoding="utf-8")
        code, error = main(["grade", str(path)]), capsys.readouterr().err
        assert code == 0 or (code == 2 and ":1: this line is nested too deeply" in error)
    assert code == 2


def test_a_gzip_file_damaged_anywhere_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl.gz"
    whole = gzip.compress(json.dumps({"prediction": "1", "gold": "2"}).encode(), mtime=0)
    damaged = [whole[:size] for size in range(1, len(whole))]
    damaged += [whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :] for place in range(len(whole))]
    for data in damaged:
        path.write_bytes(data)
        code, error = main(["grade", str(path)]), capsys.readouterr().err
        assert code == 0 or (code == 2 and len(error.strip().splitlines()) == 1), data


LINES = [
    r'{"prediction": "\ud800", "gold": "1"}',
    r'{"prediction": "\\boxed{x_{\udfff}}", "gold": "x_{\ud800}"}',
    r'{"prediction": "7", "gold": "7", "\ud800": "\ud83d"}',
    r'{"prediction": "\u0000\u2028\u0085", "gold": "\u0000"}',
    '{"prediction": "1\u2028", "gold": "1", "note": "\x7f\u0085\ufeff"}',
    '{"prediction": NaN, "gold": Infinity}',
    '{"prediction": 1e400, "gold": true}',
    '{"prediction": null, "gold": [null, "", 3]}',
    '{"prediction": "2", "gold": []}',
    '{"prediction": "\\uD83D\\uDE00", "gold": "\U0001f600"}',
]


def test_any_text_that_a_file_can_hold_is_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(LINES).encode())
    assert main(["grade", str(path), "--to", str(out)]) == 0
    written = out.read_text("utf-8").split("\n")[:-1]
    assert len(written) == len(LINES) and all("verdict" in json.loads(line) for line in written)
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii", newline="\n"))
    assert main(["grade", str(path)]) == 0
    for line, original in zip(printed.getvalue().decode("ascii").split("\n"), LINES, strict=False):
        row, given = json.loads(line), json.loads(original)
        assert {key: repr(row[key]) for key in given} == {key: repr(value) for key, value in given.items()}


def test_results_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lemma.grading import service

    quick = service.quick

    def failing(prediction: str, gold: str, rules: Any) -> Any:
        if prediction == "stop":
            raise KeyboardInterrupt
        return quick(prediction, gold, rules)

    monkeypatch.setattr(service, "quick", failing)
    out = tmp_path / "out.jsonl"
    out.write_text("earlier results\n", encoding="utf-8")
    rows = [{"prediction": str(n), "gold": "3"} for n in range(5)] + [{"prediction": "stop", "gold": "3"}]
    assert main(["grade", str(write(tmp_path / "in.jsonl", rows)), "--to", str(out)]) != 0
    assert out.read_text(encoding="utf-8") == "earlier results\n"
    kept = [json.loads(line)["verdict"] for line in (tmp_path / "out.jsonl.partial").read_text("utf-8").splitlines()]
    assert kept == ["wrong", "wrong", "wrong", "right", "wrong"]


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "in.jsonl", ROWS[:2])
    for bad in (tmp_path, path / "out.jsonl", tmp_path / ("x" * 300)):
        assert main(["grade", str(path), "--to", str(bad)]) == 2
        assert "cannot write" in capsys.readouterr().err
    assert main(["grade", str(path), "--to", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("option", ["--to", "--out", "--output"])
def test_where_to_write_has_one_name_and_is_understood_under_others(option: str, tmp_path: Path, capsys: Any) -> None:
    path, out = write(tmp_path / "in.jsonl", ROWS[:2]), tmp_path / "out.jsonl"
    assert main(["grade", str(path), option, str(out)]) == 0 and out.is_file()
    main(["grade", "--help"])
    shown = capsys.readouterr().out
    assert "--to FILE" in shown and "--out" not in shown
    assert main(["grade", str(path), "--outt", "x"]) == 2
    assert "--output" not in capsys.readouterr().err


def test_graders_of_other_systems(tmp_path: Path, capsys: Any) -> None:
    rows = [
        {"prediction": "so \\boxed{1/2}", "gold": "0.5"},
        {"prediction": "#### 7", "gold": ["8", "7"]},
        {"prediction": "#### 7", "gold": []},
    ]
    path, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    told = {}
    for grader in ("lemma", "boxed_fast", "verifier_gsm8k", "verifier_gsm8k,lemma"):
        assert main(["grade", str(path), "--to", str(out), "--grader", grader]) == 0
        told[grader] = [(row["verdict"], row["reason"]) for row in map(json.loads, out.read_text().splitlines())]
    assert [kind for kind, _ in told["lemma"]] == ["right", "right", "unknown"]
    assert [kind for kind, _ in told["boxed_fast"]] == ["right", "wrong", "unknown"]
    assert told["verifier_gsm8k"][:2] == [("wrong", "verifier_gsm8k"), ("right", "verifier_gsm8k")]
    assert [kind for kind, _ in told["verifier_gsm8k,lemma"]] == ["right", "right", "unknown"]
    capsys.readouterr()
    assert main(["grade", str(path), "--grader", "boxed_fats"]) == 2
    assert "did you mean 'boxed_fast'?" in capsys.readouterr().err
    assert main(["grade", str(path), "--grader", "boxed_fast", "--absolute", "0.1"]) == 2
    assert "are for Lemma's own grader" in capsys.readouterr().err
