"""Benchmarks during a stage, on its own engine; where it has none, one is made each time and its memory given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lemma.core.types import Problem
from lemma.engines import make_engine
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Engine
from lemma.evaluation.benchmarks import Benchmark, Loaded
from lemma.evaluation.during_training import StageEvaluator
from lemma.evaluation.eval_options import EvalOptions
from lemma.formats import Format
from lemma.models.policy import Policy
from lemma.rewards import Reward
from lemma.runs.stage import Stage

VALIDATION = "validation"


class StageBenchmarks:
    """Evaluates a stage's policy when that is due, logs the numbers, and notes whether they are the best so far.

    The benchmarks are loaded when it is made: a stage makes it before it begins, and gives it an `engine` later.
    `held_out` are problems of the stage itself, measured as one benchmark called `validation`.
    """

    def __init__(
        self,
        stage: Stage,
        options: EvalOptions,
        fmt: Format,
        policy: Policy,
        *,
        rewards: Sequence[Reward] = (),
        held_out: Sequence[Problem] = (),
    ):
        self._stage, self._policy = stage, policy
        self._name = "held-out problems" if held_out else "benchmarks"
        validation = Loaded(Benchmark(name=VALIDATION), tuple(held_out))
        place = stage.folder.path / "evaluations" / stage.name
        self.engine: Engine | None = None
        self._evaluator = StageEvaluator(
            options,
            policy,
            fmt,
            place / VALIDATION if held_out else place,
            name=f"stage {stage.name}",
            seed=stage.seed,
            rewards=rewards,
            sink=stage.emit,
            given=[validation] if held_out else [],
        )

    @property
    def choose_the_best(self) -> bool:
        """Whether the best checkpoint is chosen by benchmarks and not by a validation loss."""
        return self._evaluator.is_asked

    @property
    def longest(self) -> int:
        """Tokens that the cache of an engine must hold at least."""
        return self._evaluator.longest

    def begin(self, step: int, total: int, *, choose: bool = True) -> None:
        """Forget what a killed run measured after this step; measure the untrained policy where that is asked for, and
        what a stop broke off."""
        self._evaluator.begin(step)
        if step == 0 and self._evaluator.is_due(0, total):
            self._measure(0)
        elif self._stage.owes(self._name):
            self._choose(step, choose)

    def after(self, step: int, total: int, *, choose: bool = True) -> bool:
        """Whether this step was evaluated and is the best so far, where these numbers choose."""
        return self._evaluator.is_due(step, total) and self._choose(step, choose)

    def _choose(self, step: int, choose: bool) -> bool:
        score = self._measure(step)
        return choose and score is not None and self._stage.note_score(step, -score)

    def _measure(self, step: int) -> float | None:
        """The score; None where a stop broke the evaluation off."""
        with self._stage.clock.measure("evaluate"), self._own_engine() as engine:
            values = self._stage.evaluate(self._name, step, lambda: self._evaluator.run(engine, step))
        return None if values is None else self._evaluator.score(dict(values))

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
