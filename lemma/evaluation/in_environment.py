"""Problems that are played: an environment's own, and what it measures in addition to success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lemma.config.registry import outside_files
from lemma.core.errors import UserError
from lemma.core.types import Problem, content_id
from lemma.environments import Attempt, EnvironmentOptions
from lemma.evaluation.benchmarks import OF_ENVIRONMENT, Benchmark
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.eval_settings import EvalSettings


def own_benchmark(settings: EvalSettings) -> Benchmark:
    """The environment's own problems as a benchmark under the environment's name."""
    return Benchmark(name=settings.environment.label, source=OF_ENVIRONMENT, split=settings.split, format="own")


def own_problems(environment: EnvironmentOptions | None, benchmark: Benchmark) -> list[Problem]:
    """The problems of such a benchmark."""
    if environment is None:
        raise UserError(
            f"benchmark {benchmark.name} wants the problems of an environment, and there is none",
            fix="write `--environment NAME`, or an `environment` of the stage",
        )
    problems = environment.problems(benchmark.split)
    if not problems:
        raise UserError(
            f"environment {environment.name} has no problems of its own in split '{benchmark.split}'",
            fix="name benchmarks whose problems are played, such as a data file",
        )
    return list(problems)


def has_gold(problems: Sequence[Problem]) -> bool:
    """Whether a grader can tell anything about the answers to these."""
    return any(problem.golds for problem in problems)


def in_settings(environment: EnvironmentOptions) -> dict[str, Any]:
    """What the numbers depend on; files of a custom class by their content."""
    settings: dict[str, Any] = {"environment": environment.model_dump(mode="json")}
    files = outside_files(environment)
    if files:
        settings["environment_hash"] = content_id([path.read_text(encoding="utf-8") for path in files])
    return settings | ({} if environment.is_graded else {"scoring": "environment"})


def measures_of(
    environment: EnvironmentOptions, problems: Sequence[Problem], rows: Sequence[EvalRow]
) -> dict[str, list[float]]:
    """The measures of the environment's own, each a list of numbers from 0 to 1."""
    by_id = {problem.id: problem for problem in problems}
    success = {"right": True, "wrong": False}
    attempts = [
        Attempt(by_id[row.problem], row.sample, len(row.turns or ()), success.get(row.verdict), row.reward)
        for row in rows
    ]
    measures: Mapping[str, Sequence[float]] = environment.summarise(attempts)
    for name, values in measures.items():
        if any(not 0 <= value <= 1 for value in values):
            raise UserError(
                f"the measure {name} of environment {environment.name} has numbers outside of 0 to 1",
                fix="let `summarise` give shares",
            )
    return {str(name): [float(value) for value in values] for name, values in measures.items() if len(values)}
