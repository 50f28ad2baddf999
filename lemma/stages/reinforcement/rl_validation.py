"""Benchmarks of a reinforcement stage, and the problems that it holds out, each on its own schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lemma.core.types import Problem
from lemma.engines.protocol import Engine
from lemma.evaluation.eval_settings import BETTER_WHEN_HIGHER, EvalOptions
from lemma.evaluation.in_environment import has_gold
from lemma.formats import Format
from lemma.models.policy import Policy
from lemma.runs.stage import Stage
from lemma.stages.evaluating import StageBenchmarks
from lemma.stages.reinforcement.rl_options import ReinforcementOptions


class RlBenchmarks:
    """Both as one. If there are benchmarks, they choose the best checkpoint, otherwise the held-out problems do."""

    def __init__(
        self,
        stage: Stage,
        options: ReinforcementOptions,
        fmt: Format,
        policy: Policy,
        held_out: Sequence[Problem],
        max_tokens: int,
    ):
        environment = None if options.environment.is_single_turn else options.environment
        how: dict[str, Any] = {"rewards": options.rewards, "environment": environment}
        self._benchmarks = StageBenchmarks(stage, options.eval, fmt, policy, **how)
        self._parts = [self._benchmarks]
        if held_out:
            own = validation_options(options, max_tokens)
            if own.metric == "answer_accuracy" and not (options.environment.is_scored_by_itself or has_gold(held_out)):
                own = own.model_copy(update={"metric": "reward"})
            self._parts.append(StageBenchmarks(stage, own, fmt, policy, held_out=held_out, **how))

    @property
    def longest(self) -> int:
        """Minimum number of tokens that an engine's cache must hold."""
        return max(part.longest for part in self._parts)

    def begin(self, step: int, total: int, engine: Engine) -> None:
        for part in self._parts:
            part.begin(step, total, engine, choose=part is self._chooser)

    def due_steps(self, total: int) -> frozenset[int]:
        """The steps after which an evaluation is due."""
        return frozenset(step for step in range(1, total + 1) if any(part.is_due(step, total) for part in self._parts))

    def after(self, step: int, total: int, engine: Engine) -> bool:
        """Whether this step was evaluated and is the best so far."""
        best = [part.after(step, total, engine, choose=part is self._chooser) for part in self._parts]
        return any(best)

    @property
    def _chooser(self) -> StageBenchmarks:
        return self._benchmarks if self._benchmarks.choose_the_best else self._parts[-1]


def validation_options(options: ReinforcementOptions, max_tokens: int) -> EvalOptions:
    """How held-out problems are measured: with the settings of `eval`, and the response length of training."""
    metric = options.eval.metric if options.eval.metric in BETTER_WHEN_HIGHER else "answer_accuracy"
    changes = {"benchmarks": [], "every": options.validation.every, "metric": metric, "max_tokens": max_tokens}
    return options.eval.model_copy(update={**changes, "limit": None, "shots": None})
