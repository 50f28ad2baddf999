"""What people stumble over on their first evening: the words that answer them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lemma.cli import main
from lemma.core.errors import UserError, nearest
from lemma.core.events import StageStarted
from lemma.data.data_options import SourceOptions
from lemma.data.sources import files_of
from lemma.models.load_model import load_for_inference
from lemma.reporting.text import describe

PLAIN = {"question": "What is 2 plus 3?", "answer": "2 + 3 = 5\n#### 5"}


def test_a_poor_guess_is_not_offered() -> None:
    rewards = ["accuracy", "format", "length", "code"]
    assert nearest("math", rewards) == "write 'accuracy'"
    assert nearest("matter", ["format", "length"]) == "write one of: format, length"


@pytest.mark.parametrize(
    ("option", "said"),
    [("--rows", "write one of: --config"), ("--spilt", "did you mean '--split'?"), ("--limits", "'--limit'?")],
)
def test_dashes_make_no_options_alike(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "x.jsonl", option, "1"]) == 2
    err = capsys.readouterr().err
    assert said in err and "--help" not in err


def test_a_plan_says_what_the_rows_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PLAIN))
    recipe = {"run": {"dir": str(tmp_path / "run")}, "model": {"path": "tiny"}, "format": "question_only"}
    recipe["stages"] = {"dpo": {"kind": "preference", "algorithm": "dpo", "checkpoint": {"every": 1}}}
    recipe["stages"]["dpo"]["data"] = {"source": str(tmp_path / "rows.jsonl")}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 0
    out = capsys.readouterr().out
    assert f"warning: {tmp_path}/rows.jsonl:1: this row lacks a chosen and a rejected response" in out
    assert "checkpoints  after each step and at the end" in out


def test_a_misspelt_split_of_one_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(PLAIN))
    for split in ("train", "test", "train[:50%]", "cot", "train_prefs"):
        assert files_of(SourceOptions(source=str(file), split=split)) == [file]
    with pytest.raises(UserError, match="there is no split 'trian'; did you mean 'train'"):
        files_of(SourceOptions(source=str(file), split="trian[:10]"))


def test_a_misspelt_folder_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"there is no folder smolm2, .*; did you mean 'smollm2'"):
        load_for_inference("smolm2", "cpu")


def test_one_step() -> None:
    assert describe(StageStarted("sft", 0, 1, resumed=False)) == "sft: 1 step"
