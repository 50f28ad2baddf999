"""`lemma plan` says what prompts are made of, and what is odd about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lemma.cli import main
from lemma.planning.run_plan import unused_template
from lemma.recipe import load_recipe

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


def test_a_chat_template_that_nobody_asked_to_pass_over_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path, chat = tmp_path / "recipe.yaml", tmp_path / "model" / "tokenizer_config.json"
    path.write_text(yaml.safe_dump({"model": {"path": str(tmp_path / "model")}, "stages": {"sft": {}}}))
    assert unused_template(load_recipe(path)) == []
    chat.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    [sentence] = unused_template(load_recipe(path))
    assert sentence.endswith("does not use it; write `format: chat`, or `format: r1_zero` to keep it")
    for named in ("chat", "r1_zero"):
        assert unused_template(load_recipe(path, [f"format={named}"])) == []
