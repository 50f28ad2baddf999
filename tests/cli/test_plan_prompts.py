"""`lemma plan` says what prompts are made of, and what is odd about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lemma.cli import main

ROW = {"prompt": "Q: 2+2?", "response": "4"}


def plan(folder: Path, capsys: pytest.CaptureFixture[str], row: dict[str, str], **data: object) -> str:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    stages = {"sft": {"data": {"source": str(folder / "rows.jsonl"), **data}}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"run": {"dir": str(folder / "run")}, "stages": stages}))
    assert main(["plan", str(folder / "recipe.yaml")]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("prompts")]
    return line.strip().removeprefix("prompts").strip()


def test_plan_says_whether_prompts_are_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, capsys, ROW) == "as the format writes them"
    assert plan(tmp_path, capsys, ROW, verbatim=True) == "word for word, as the rows have them"
    assert plan(tmp_path, capsys, {"text": "Two and two."}) == "none: the rows are text, which is learnt whole"
