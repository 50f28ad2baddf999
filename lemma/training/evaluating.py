"""Benchmarks of a stage that has no engine of its own: one is made for each evaluation, and its memory given back."""

from __future__ import annotations

import torch

from lemma.engines import make_engine
from lemma.engines.options import NativeOptions
from lemma.evaluation.options import EvalOptions
from lemma.evaluation.stage import StageEvaluator
from lemma.formats import Format
from lemma.models.policy import Policy
from lemma.training.stage import Stage


class StageBenchmarks:
    """Evaluates a stage's policy when that is due, logs the numbers, and notes whether they are the best so far."""

    def __init__(self, stage: Stage, options: EvalOptions, fmt: Format, policy: Policy):
        self._stage, self._policy = stage, policy
        self._evaluator = StageEvaluator(
            options,
            policy,
            fmt,
            stage.folder.path / "evaluations" / stage.name,
            name=f"stage {stage.name}",
            seed=stage.seed,
            sink=stage.emit,
        )

    @property
    def choose_the_best(self) -> bool:
        """Whether the best checkpoint is chosen by benchmarks and not by a validation loss."""
        return self._evaluator.is_asked

    def begin(self, step: int, total: int) -> None:
        """Forget what a killed run measured after this step; measure the untrained policy where that is asked for."""
        self._evaluator.begin(step)
        if step == 0 and self._evaluator.is_due(0, total):
            self._measure(0)

    def after(self, step: int, total: int) -> bool:
        """Whether this step was evaluated and is the best so far."""
        return self._evaluator.is_due(step, total) and self._stage.note_score(step, -self._measure(step))

    def _measure(self, step: int) -> float:
        with self._stage.clock.measure("evaluate"):
            engine = make_engine(NativeOptions(), self._policy, self._stage.seed, self._stage.emit)
            try:
                values = self._evaluator.run(engine, step)
            finally:
                engine.close()
                if self._policy.device.type == "cuda":
                    torch.cuda.empty_cache()
        self._stage.measure(step, "eval", values, {})
        return self._evaluator.score(values)
