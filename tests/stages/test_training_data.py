"""What stages make of rows: the prompts that a model meets in training, and what is said of rows left out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from lemma.data.choices import ASK_FOR_LETTER
from lemma.evaluation.benchmarks import Benchmark, load_benchmark
from lemma.formats import make_format
from lemma.models.policy import Policy
from lemma.runs.stage import Stage
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_tasks import prepare_tasks
from lemma.stages.supervised import prepare
from lemma.stages.supervised_options import SupervisedOptions
from tests.formats.tokenizers_made_here import make_tokenizer

CHOICES = ["the sky", "grass", "fire", "snow"]
FORMAT = make_format("question_only")


@dataclass
class Around:
    """As much of a stage and of a policy as the making of prompts needs."""

    name: str = "learn"
    seed: int = 0
    data: str = ""
    context: int = 1000
    said: list[str] = field(default_factory=list)
    tokenizer: Any = field(default_factory=make_tokenizer)

    def say(self, text: str) -> None:
        self.said.append(text)

    warn = say

    def tasks(self, **options: Any) -> list[Any]:
        found = ReinforcementOptions.model_validate({"rollout": {"max_tokens": 8}, **options})
        return prepare_tasks(cast(Stage, self), found, FORMAT, cast(Policy, self))[0]

    def learnt(self, **options: Any) -> list[str]:
        found = SupervisedOptions.model_validate({"epochs": 1, **options})
        return [self.text(t.ids_T) for t in prepare(cast(Stage, self), found, FORMAT, cast(Policy, self))[0].items]

    def text(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def colours(path: Path, **more: Any) -> str:
    """Questions with four options each, of which the third is right."""
    rows = [{"id": str(n), "dataset": "colours", "problem": f"What is red? {n}", "answer": "C"} for n in range(12)]
    return write(path, [{**row, "choices": CHOICES, "labels": list("ABCD"), **more} for row in rows])


def test_reinforcement_asks_with_the_options_in_the_order_of_the_evaluation(tmp_path: Path) -> None:
    source = colours(tmp_path / "a.jsonl")
    tasks = Around().tasks(data={"source": source})
    for task in tasks:
        prompt = Around().text(task.prompt)
        assert f"\n{task.problem.gold}) fire\n" in prompt and ASK_FOR_LETTER in prompt
    assert len({task.problem.gold for task in tasks}) > 1
    evaluated = load_benchmark(Benchmark(name="colours", source=source)).problems
    assert [task.problem for task in tasks] == list(evaluated)


@pytest.mark.parametrize("more", [{"response": "It burns: C"}, {"reasoning": "It burns: C"}, {"target": "It burns: C"}])
def test_a_response_to_imitate_meets_the_options_in_the_order_it_speaks_of(more: Any, tmp_path: Path) -> None:
    source = colours(tmp_path / "a.jsonl", **more)
    listed = "\n\nA) the sky\nB) grass\nC) fire\nD) snow\n\n" + ASK_FOR_LETTER
    around = Around()
    texts = around.learnt(data={"source": source})
    assert len(texts) == 12 and all(listed in text and "It burns: C" in text for text in texts)
    tasks = around.tasks(data={"source": source}, algorithm="luffy")
    assert all(listed in around.text(task.prompt) and task.problem.gold == "C" for task in tasks)
    assert all("It burns: C" in around.text(task.trace) for task in tasks)


def test_prompts_that_are_too_long_are_counted(tmp_path: Path) -> None:
    rows = [{"question": "1+1? " * n, "answer": "easy\n#### 2"} for n in (1, 1, 9, 1)]
    data = {"source": write(tmp_path / "a.jsonl", rows), "prompt_length": {"max_tokens": 20}}
    sentence = "1 of 4 prompts are longer than the 20 tokens of prompt_length and were left out"
    around = Around()
    assert len(around.tasks(data=data)) == 3 and around.said == [sentence]
    around = Around()
    assert len(around.learnt(data=data)) == 3 and around.said == [sentence]
