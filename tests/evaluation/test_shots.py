"""Solved examples in front of the question: which, and how they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.evaluation.benchmarks import BENCHMARKS, Benchmark, example_source
from lemma.evaluation.questions import EvalSettings, load_all, prepare
from lemma.evaluation.shots import STOP, Shots, load_shots, prompt_with
from lemma.formats import make_format
from lemma.models.load_model import load_policy
from lemma.models.policy import Policy


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def mine(tmp_path: Path) -> Benchmark:
    """Four worked training rows of two subjects and a test row that is one of them."""
    rows = [
        {"problem": f"{n} + {n} ?", "solution": f"so \\boxed{{{2 * n}}}", "type": "odd" if n % 2 else "even"}
        for n in (1, 2, 3, 4)
    ]
    write(tmp_path / "train.jsonl", rows)
    return Benchmark(name="mine", source=write(tmp_path / "test.jsonl", rows[:1]))


def test_examples_come_from_the_training_file_and_never_are_the_question(mine: Benchmark) -> None:
    shots = load_shots(mine, 3, "chat", None)
    asked = Problem((Message("user", "1 + 1 ?"),), ("2",))
    assert {one.problem.question for one in shots.of(asked)} == {"2 + 2 ?", "3 + 3 ?", "4 + 4 ?"}
    assert shots.of(asked) == load_shots(mine, 3, "text", None).of(asked), "always the same ones"
    with pytest.raises(UserError, match="only 3 examples"):
        Shots(shots.pool, 4, "chat").of(asked)


def test_examples_of_the_same_subject_where_there_are_enough(mine: Benchmark) -> None:
    shots = load_shots(mine, 2, "chat", None)
    assert {one.problem.subject for one in shots.of(Problem((Message("user", "?"),), subject="even"))} == {"even"}
    assert len(shots.of(Problem((Message("user", "?"),), subject="prime"))) == 2


def test_examples_as_turns_and_as_text(mine: Benchmark) -> None:
    policy: Policy = load_policy("tiny", "cpu")
    fmt = make_format({"name": "r1_zero", "preamble": False})
    asked = Problem((Message("user", "9 + 9 ?"),), ("18",))
    shots = load_shots(mine, 1, "chat", None)
    (one,) = shots.of(asked)
    solved = f"<think> so \\boxed{{{one.answer}}} </think> <answer> {one.answer} </answer>"
    end = policy.tokenizer.eos_token
    assert prompt_with(shots, fmt, asked, policy.tokenizer) == (
        f"User: {one.problem.question}\nAssistant: {solved}{end}\nUser: 9 + 9 ?\nAssistant: <think>"
    )
    assert prompt_with(Shots(shots.pool, 1, "text"), fmt, asked, policy.tokenizer) == (
        f"Question: {one.problem.question}\nAnswer: {solved}\n\nQuestion: 9 + 9 ?\nAnswer: <think>"
    )
    boxed = prompt_with(Shots(shots.pool, 1, "text"), make_format("boxed"), asked, policy.tokenizer)
    assert boxed.startswith(f"Question: {one.problem.question}\nAnswer: so ") and boxed.endswith("9 + 9 ?\nAnswer:")


def test_text_ends_where_the_model_asks_itself_another_question(mine: Benchmark) -> None:
    policy = load_policy("tiny", "cpu")
    for kind, stops in (("text", True), ("chat", False)):
        settings = EvalSettings(shots=1, shots_as=kind, format="r1_zero", max_tokens=4)  # type: ignore[arg-type]
        (loaded,) = load_all([mine], settings)
        asked = prepare(loaded, policy, settings)
        assert (STOP in asked.sampling.stop) is stops and asked.shots is not None
        (shown,) = asked.shots.of(loaded.problems[0])
        assert len(asked.asks) == 1 and shown.problem.question in asked.prompts[0]


def test_where_examples_come_from(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    row = {"question": "2+2?", "answer": "4\n#### 4"}
    write(tmp_path / "gsm8k" / "train.jsonl", [row])
    assert example_source(BENCHMARKS["gsm8k"], tmp_path).source == str(tmp_path / "gsm8k" / "train.jsonl")
    hub = example_source(BENCHMARKS["mmlu_pro"], None)
    assert (hub.source, hub.split) == ("mmlu_pro", "validation")
    assert example_source(BENCHMARKS["aime24"], None).source == "math"
    assert example_source(BENCHMARKS["arithmetic"], None).split == "train"
    for benchmark in (BENCHMARKS["gpqa_diamond"], Benchmark(name="own", source=write(tmp_path / "own.jsonl", [row]))):
        with pytest.raises(UserError, match=f"{benchmark.name} has no training data"):
            example_source(benchmark, None)
