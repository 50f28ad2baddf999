"""Benchmarks of a reinforcement stage, and the problems that it holds out, each on its own schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lemma.core.types import Problem
from lemma.evaluation.eval_settings import BETTER_WHEN_HIGHER, EvalOptions
from lemma.evaluation.in_environment import has_gold
from lemma.formats import Format
from lemma.models.policy import Policy
from lemma.runs.stage import Stage
from lemma.stages.evaluating import StageBenchmarks
from lemma.stages.reinforcement.rl_options import ReinforcementOptions


def stage_benchmarks(
    stage: Stage,
    options: ReinforcementOptions,
    fmt: Format,
    policy: Policy,
    held_out: Sequence[Problem],
    max_tokens: int,
) -> list[StageBenchmarks]:
    """What is measured. If there are benchmarks, they choose the best checkpoint, otherwise the held-out problems
    do."""
    environment = None if options.environment.is_single_turn else options.environment
    how: dict[str, Any] = {"rewards": options.rewards, "environment": environment}
    found = [StageBenchmarks(stage, options.eval, fmt, policy, **how)] if options.eval.benchmarks else []
    if held_out:
        own = validation_options(options, max_tokens)
        if own.metric == "answer_accuracy" and options.environment.is_graded and not has_gold(held_out):
            own = own.model_copy(update={"metric": "reward"})
        found.append(StageBenchmarks(stage, own, fmt, policy, held_out=held_out, chooses=not found, **how))
    return found


def validation_options(options: ReinforcementOptions, max_tokens: int) -> EvalOptions:
    """How held-out problems are measured: with the settings of `eval`, and the response length of training."""
    metric = options.eval.metric if options.eval.metric in BETTER_WHEN_HIGHER else "answer_accuracy"
    changes = {"benchmarks": [], "every": options.validation.every, "metric": metric, "max_tokens": max_tokens}
    return options.eval.model_copy(update={**changes, "limit": None, "shots": None})
