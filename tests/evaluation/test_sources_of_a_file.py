"""A file that holds several benchmarks, as LUFFY's validation files do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.evaluation.benchmarks import BENCHMARKS, Benchmark, load_parts
from lemma.evaluation.during_training import StageEvaluator
from lemma.evaluation.eval_settings import PRESETS, EvalOptions, find_preset
from lemma.formats import make_format
from lemma.models.load_model import load_policy


def row(source: str, question: str, gold: str) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": "LUFFY's"}, {"role": "user", "content": question}],
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "ability": "math",
        "extra_info": {"index": 0, "split": "test"},
    }


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Two problems of aime, four copies of each, and three of minerva."""
    rows = [row("aime", f"{n} + 1 ?", str(n + 1)) for n in (1, 2) for _ in range(4)]
    rows += [row("minerva", f"{n} + 2 ?", str(n + 2)) for n in (1, 2, 3)]
    path = tmp_path / "valid.all.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_one_benchmark_for_each_source_and_copies_are_samples(file: str) -> None:
    parts = {one.name: one for one in load_parts(Benchmark(name="valid.all", source=file), limit=None, data_dir=None)}
    assert {name: (len(one.problems), one.benchmark.samples) for name, one in parts.items()} == {
        "aime": (2, 4),
        "minerva": (3, 1),
    }
    assert parts["minerva"].benchmark.rules == BENCHMARKS["minerva"].rules
    assert all(problem.system is None for one in parts.values() for problem in one.problems)
    few = load_parts(Benchmark(name="valid.all", source=file), limit=1, data_dir=None)
    assert [len(one.problems) for one in few] == [1, 1]
    (whole,) = load_parts(Benchmark(name="v", source=file, per_source=False), limit=None, data_dir=None)
    assert len(whole.problems) == 11


def test_rows_of_one_source_may_repeat_those_of_another(tmp_path: Path) -> None:
    rows = [row(source, f"{n} ?", str(n)) for source in ("a", "b") for n in (1, 2) for _ in range(3)]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    parts = load_parts(Benchmark(name="mine", source=str(path)), limit=None, data_dir=None)
    found = {one.name: ([problem.question for problem in one.problems], one.benchmark.samples) for one in parts}
    assert found == {"a": (["1 ?", "2 ?"], 3), "b": (["1 ?", "2 ?"], 3)}


def test_ids_of_a_files_own_stay_apart(tmp_path: Path) -> None:
    """Also where one of them is what a repeated row would be called."""
    path = tmp_path / "mine.jsonl"
    rows = [{"id": name, "question": f"{n} ?", "answer": "1"} for n, name in enumerate(("c", "c", "c#2", "c"))]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    (part,) = load_parts(Benchmark(name="mine", source=str(path)), limit=None, data_dir=None)
    assert [problem.id for problem in part.problems] == ["c", "c#3", "c#2", "c#4"]


def test_a_stage_may_choose_by_the_mean_over_the_sources_of_a_file(file: str, tmp_path: Path) -> None:
    options = EvalOptions.model_validate({"benchmarks": [file], "metric": "valid.all/answer_accuracy"})
    policy = load_policy("tiny", "cpu")
    stage = StageEvaluator(options, policy, make_format("r1_zero"), tmp_path / "out", name="stage")
    values = {"evaluation/aime/answer_accuracy": 0.5, "evaluation/minerva/answer_accuracy": 0.1}
    assert stage.score({**values, "evaluation/answer_accuracy": 0.3}) == pytest.approx(0.3)


def test_the_preset_of_luffy() -> None:
    luffy = find_preset("luffy")
    assert luffy.options == {"temperature": 0.6, "top_p": 1.0, "max_tokens": 8192}
    samples = {name: luffy.of(one).samples for name, one in BENCHMARKS.items()}
    assert {name for name, count in samples.items() if count == 32} == {"aime24", "aime25", "amc", "amc23"}
    assert {count for name, count in samples.items()} == {1, 32}
    with pytest.raises(UserError, match="no preset 'lufy'"):
        find_preset("lufy")
    assert set(PRESETS) == {"luffy"}
