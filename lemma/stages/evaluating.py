"""Benchmarks during a stage, on its own engine; where it has none, one is made each time and its memory given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lemma.engines import make_engine
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Engine
from lemma.evaluation.during_training import StageEvaluator
from lemma.evaluation.eval_options import EvalOptions
from lemma.formats import Format
from lemma.models.policy import Policy
from lemma.rewards import Reward
from lemma.runs.stage import Stage


class StageBenchmarks:
    """Evaluates a stage's policy when that is due, logs the numbers, and notes whether they are the best so far.

    The benchmarks are loaded when it is made: a stage makes it before it begins, and gives it an `engine` later.
    """

    def __init__(
        self,
        stage: Stage,
        options: EvalOptions,
        fmt: Format,
        policy: Policy,
        *,
        rewards: Sequence[Reward] = (),
    ):
        self._stage, self._policy = stage, policy
        self.engine: Engine | None = None
        self._evaluator = StageEvaluator(
            options,
            policy,
            fmt,
            stage.folder.path / "evaluations" / stage.name,
            name=f"stage {stage.name}",
            seed=stage.seed,
            rewards=rewards,
            sink=stage.emit,
        )

    @property
    def choose_the_best(self) -> bool:
        """Whether the best checkpoint is chosen by benchmarks and not by a validation loss."""
        return self._evaluator.is_asked

    @property
    def longest(self) -> int:
        """Tokens that the cache of an engine must hold at least."""
        return self._evaluator.longest

    def begin(self, step: int, total: int) -> None:
        """Forget what a killed run measured after this step; measure the untrained policy where that is asked for."""
        self._evaluator.begin(step)
        if step == 0 and self._evaluator.is_due(0, total):
            self._measure(0)

    def after(self, step: int, total: int) -> bool:
        """Whether this step was evaluated and is the best so far."""
        return self._evaluator.is_due(step, total) and self._stage.note_score(step, -self._measure(step))

    def _measure(self, step: int) -> float:
        with self._stage.clock.measure("evaluate"), self._own_engine() as engine:
            values = self._evaluator.run(engine, step)
        self._stage.measure(step, "eval", values, {})
        return self._evaluator.score(values)

    @contextmanager
    def _own_engine(self) -> Iterator[Engine]:
        if self.engine is not None:
            yield self.engine
            return
        engine = make_engine(NativeOptions(), self._policy, self._stage.seed, self._stage.emit)
        try:
            yield engine
        finally:
            engine.close()
            if self._policy.device.type == "cuda":
                torch.cuda.empty_cache()
