"""What people stumble over on their first evening: the words that answer them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lemma.cli import main
from lemma.core.errors import UserError, nearest, nearest_file
from lemma.core.events import Measured, StageEnded, StageStarted
from lemma.data.data_options import SourceOptions
from lemma.data.sources import files_of
from lemma.models.load_model import load_for_inference
from lemma.recipe import load_recipe
from lemma.reporting.console import describe, ended
from lemma.reports.page_data import differences

PLAIN = {"question": "What is 2 plus 3?", "answer": "2 + 3 = 5\n#### 5"}


def test_a_poor_guess_is_not_offered() -> None:
    rewards = ["accuracy", "format", "length", "code"]
    assert nearest("math", rewards) == "write 'accuracy'"
    assert nearest("matter", ["format", "length"]) == "write one of: format, length"


def test_endings_make_no_files_alike() -> None:
    files = ["chat.jsonl", "gsm200.jsonl", "train.jsonl", "train.jsonl.gz"]
    assert nearest_file("gsm2000.jsonl", files) == "gsm200.jsonl" and nearest_file("nosuch.jsonl", files) is None
    assert nearest_file("trian.jsonl", files) == "train.jsonl"


@pytest.mark.parametrize(
    ("option", "said"),
    [("--rows", "write one of: --config"), ("--spilt", "did you mean '--split'?"), ("--limits", "'--limit'?")],
)
def test_dashes_make_no_options_alike(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "x.jsonl", option, "1"]) == 2
    err = capsys.readouterr().err
    assert said in err and "--help" not in err


@pytest.mark.parametrize(
    ("recipe", "fix"),
    [
        ({"model": "smollm2"}, "write `model: {path: smollm2}`"),
        ({"model": {"name": "smollm2"}}, "did you mean 'path'?"),
        ({"stages": {"grpo": {"rewards": "accuracy"}}}, "write it as a list: `[accuracy]`"),
        ({"stages": {"sft": {"data": "rows.jsonl"}}}, "write `data: {source: rows.jsonl}`"),
        ({"stages": {"sft": {"validation": 0.1}}}, "write `validation: {share: 0.1}`"),
        ({"stages": {"sft": {"validation": True}}}, "write a mapping with any of: share"),
    ],
)
def test_what_was_meant_by_a_bare_value(recipe: dict[str, Any], fix: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps({"stages": {"sft": {}}} | recipe))
    with pytest.raises(UserError, match=re.escape(fix)):
        load_recipe(tmp_path / "recipe.yaml")


def test_an_option_that_python_cannot_call_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text("from lemma.environments import Environment\nclass World(Environment): pass\n")
    stage = {"kind": "rl", "data": {"source": "arithmetic"}, "environment": {"name": "custom", "class": "no.py:One"}}
    stage["rollout"] = {"max_tokens": 8}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"stages": {"rl": stage}}))
    place, world = "stages.rl.environment.class", f"{tmp_path}/world.py:World"
    environment = load_recipe(tmp_path / "recipe.yaml", [f"{place}={world}"]).stages["rl"].environment
    assert environment.class_ == world
    with pytest.raises(UserError, match="did you mean 'class'"):
        load_recipe(tmp_path / "recipe.yaml", [f"{place}_={world}"])


def test_a_plan_says_what_the_rows_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PLAIN))
    recipe = {"run": {"dir": str(tmp_path / "run")}, "model": {"path": "tiny"}, "format": "question_only"}
    recipe["stages"] = {"dpo": {"kind": "preference", "algorithm": "dpo", "checkpoint": {"every": 1}}}
    recipe["stages"]["dpo"]["data"] = {"source": str(tmp_path / "rows.jsonl")}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 1
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


def test_weights_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = load_for_inference("tiny", "cpu")
    model.save_pretrained(tmp_path / "model")
    assert main(["generate", str(tmp_path / "model"), "what is 2 plus 3 ?"]) == 2
    said = f"the folder {tmp_path}/model holds no tokenizer; put tokenizer.json"
    assert said in capsys.readouterr().err
    recipe = {"model": {"path": str(tmp_path / "model")}, "stages": {"sft": {"data": {"source": "arithmetic"}}}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 1
    assert f"warning: {said}" in capsys.readouterr().out


def test_a_run_that_has_not_begun_to_learn(tmp_path: Path) -> None:
    for name in ("recipe.yaml", "run.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="has no finished model yet"):
        load_for_inference(str(tmp_path), "cpu")


def test_options_that_differ_are_spelled_as_in_a_recipe() -> None:
    lora = {"r": 8, "alpha": 16.0}
    recipes = [{"model": {"path": "a", "lora": lora}}, {"model": {"path": "a", "lora": None}}]
    recipes = [
        recipe | {"stages": {"sft": {"epochs": epochs}}} for recipe, epochs in zip(recipes, (2.0, None), strict=True)
    ]
    rows = {row["key"]: row["values"] for row in differences([SimpleNamespace(recipe=one) for one in recipes])}
    assert rows == {"model.lora": ["there", "not there"], "stages.sft.epochs": ["2", "null"]}


def test_one_step() -> None:
    assert describe(StageStarted("sft", 0, 1, resumed=False)) == "sft: 1 step"


def test_a_share_is_a_percentage_at_the_end_as_well() -> None:
    last = Measured("rl", 3, "train", {"right": 0.25, "loss": 0.5}, {})
    assert ended(StageEnded("rl", 3, {}), last) == "rl: ended at step 3: right 25%, loss 0.5"


@pytest.mark.filterwarnings("ignore:the tokenizer has no tokens")
def test_a_template_that_knows_no_tools_loses_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would write a call as an empty turn, which would then be learnt."""
    _, tokenizer = load_for_inference("tiny", "cpu")
    turns = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2*21"}}}
    asked = {"role": "user", "content": "what is 2 times 21 ?"}
    rows = [{"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]}]
    rows[0]["messages"] += [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "42"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps(rows[0]))
    show = ["data", "show", str(tmp_path / "chat.jsonl"), "--format", "own", "--model", str(tmp_path / "model")]
    for template, lost in ((turns, True), (turns.replace("m['content']", "m | string"), False)):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "model")
        assert main(show) == (2 if lost else 0)
        assert ("chat template leaves out the calls of" in capsys.readouterr().err) is lost
