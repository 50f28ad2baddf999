"""What a run reads and is not there (data, benchmarks, a reward of one's own) stops it before anything is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lemma.cli import main
from lemma.core.errors import UserError
from lemma.core.events import silent
from lemma.recipe import Recipe
from lemma.runs.run import train


def recipe(folder: Path, **stage: Any) -> Recipe:
    data = {"arithmetic": {"operations": 1, "largest": 10, "count": 8}}
    own = {"kind": "rl", "data": data, "steps": 1, "batch": {"problems": 1}, "rollout": {"max_tokens": 4}}
    return Recipe.model_validate(
        {
            "run": {"dir": str(folder), "threads": 1, "device": "cpu", "tensorboard": False},
            "model": {"path": "tiny", "tiny": {"hidden": 16, "layers": 1, "feed_forward": 16, "context": 64}},
            "format": {"name": "r1_zero", "preamble": False},
            "stages": {"rl": {**own, **stage}},
        }
    )


def test_a_function_that_is_not_there_is_told_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def polite(item):\n    return 1.0\n")
    with pytest.raises(UserError, match="there is no 'polit'; did you mean 'polite'"):
        train(
            recipe(tmp_path / "run", rewards=[{"name": "custom", "function": f"{tmp_path}/mine.py:polit"}]), sink=silent
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": {"source": "nothere.jsonl"}}, r"stage late: the file or folder 'nothere.jsonl' does not exist"),
        ({"data": {"mix": [{"source": "arithmetic"}, {"source": "x/nothere.csv"}]}}, r"'x/nothere.csv' does not exist"),
        ({"eval": {"benchmarks": ["nothere.jsonl"]}}, r"stage late: the file or folder 'nothere.jsonl' does not exist"),
        ({"eval": {"benchmarks": ["gsm8k"], "data_dir": "."}}, r"stage late: . has no file of benchmark gsm8k"),
        ({"rewards": ["nothere.py:mine"]}, r"stage late: there is no file 'nothere.py'"),
    ],
    ids=str,
)
def test_what_a_later_stage_lacks_is_told_before_an_earlier_one_is_trained(
    changes: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stages = recipe(tmp_path / "run").model_dump(mode="json")
    stages["stages"]["late"] = stages["stages"]["rl"] | changes
    wrong = Recipe.model_validate(stages)
    with pytest.raises(UserError, match=sentence):
        train(wrong, sink=silent)
    assert not (tmp_path / "run").exists()
    (tmp_path / "recipe.yaml").write_text(wrong.to_yaml())
    assert main(["plan", "recipe.yaml"]) == 1
    assert train(wrong, skip=["late"], sink=silent) == 0


def test_data_of_a_finished_stage_may_be_gone(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2+2?", "answer": "4"}\n' * 4)
    data = {"source": str(rows)}
    assert train(recipe(tmp_path / "run", data=data), sink=silent) == 0
    rows.unlink()
    assert train(recipe(tmp_path / "run", data=data), sink=silent) == 0


def test_a_fresh_start_without_its_benchmark_puts_the_earlier_run_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(recipe(folder), sink=silent) == 0
    wrong = recipe(folder, eval={"benchmarks": [str(tmp_path / "missing.jsonl")]})
    with pytest.raises(UserError, match="does not exist"):
        train(wrong, fresh=True, sink=silent)
    assert (folder / "stages" / "rl" / "done.json").is_file()


def test_a_punishment_of_length_that_no_response_reaches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"begins after 12288 tokens, which no response has; give it `max_tokens: 4`"):
        recipe(tmp_path, rewards=["accuracy", "soft_overlong"])
    recipe(tmp_path, rewards=["accuracy", {"name": "soft_overlong", "max_tokens": 4, "margin": 1}])
