"""Lemma teaches language models to reason.

    run = lemma.train("recipe.yaml")                      # a run folder, its metrics and its models
    evaluation = lemma.evaluate(run.folder, "gsm8k")      # numbers with intervals
    answers = lemma.generate(run.folder, "What is 6 times 7?")
    verdict = lemma.grade("\\frac{1}{2}", "0.5")

docs/python.md says more. Nothing heavy is imported here: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lemma.api.evaluate_call import Evaluation, evaluate
    from lemma.api.generate_call import Answer, generate
    from lemma.api.run_result import MetricRow, Run, StageEvaluation, StageResult, load_run
    from lemma.api.train_call import train
    from lemma.core.errors import UserError
    from lemma.grading import Verdict, grade
    from lemma.recipe import Recipe, load_recipe

_HOMES = {
    "train": "lemma.api.train_call",
    "evaluate": "lemma.api.evaluate_call",
    "generate": "lemma.api.generate_call",
    "grade": "lemma.grading",
    "load_run": "lemma.api.run_result",
    "load_recipe": "lemma.recipe",
    "Answer": "lemma.api.generate_call",
    "Evaluation": "lemma.api.evaluate_call",
    "MetricRow": "lemma.api.run_result",
    "Recipe": "lemma.recipe",
    "Run": "lemma.api.run_result",
    "StageEvaluation": "lemma.api.run_result",
    "StageResult": "lemma.api.run_result",
    "UserError": "lemma.core.errors",
    "Verdict": "lemma.grading",
}

__all__ = [
    "Answer",
    "Evaluation",
    "MetricRow",
    "Recipe",
    "Run",
    "StageEvaluation",
    "StageResult",
    "UserError",
    "Verdict",
    "evaluate",
    "generate",
    "grade",
    "load_recipe",
    "load_run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lemma' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
