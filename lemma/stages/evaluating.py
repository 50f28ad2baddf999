"""What a stage measures during training: benchmarks, and the loss on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Union

import torch

from lemma.core.types import Problem
from lemma.engines import make_engine
from lemma.engines.protocol import Engine
from lemma.environments import EnvironmentOptions
from lemma.evaluation.benchmarks import Benchmark, Loaded, unique
from lemma.evaluation.during_training import StageEvaluator
from lemma.evaluation.eval_settings import EvalOptions
from lemma.formats import Format
from lemma.models.policy import Policy
from lemma.rewards import Reward
from lemma.runs.stage import Stage

VALIDATION = "validation"


Measure = Union["HeldOutLoss", "StageBenchmarks"]


def stage_measures(
    stage: Stage,
    options: EvalOptions,
    fmt: Format,
    policy: Policy,
    loss: Callable[[], Mapping[str, float]] | None,
    every: int,
) -> list[Measure]:
    """The loss on held-out data, every so many steps and where there is any, then the benchmarks. These choose the best
    checkpoint, if there are some."""
    measures: list[Measure] = []
    if loss is not None:
        measures.append(HeldOutLoss(stage, loss, every, chooses=not options.benchmarks))
    if options.benchmarks:
        measures.append(StageBenchmarks(stage, options, fmt, policy))
    return measures


class StageBenchmarks:
    """Evaluates a stage's policy when that is due, logs the numbers, and notes whether they are the best so far, where
    it `chooses` the best checkpoint. A stage that measures nothing has none.

    The benchmarks are loaded on construction, so that a stage that cannot read them stops before it begins. A stage
    without an engine passes none: that of its options is made for each evaluation and its memory released. `held_out`
    are problems of the stage itself, measured as one benchmark called `validation`. With an `environment`, problems are
    played in it.
    """

    note = ""

    def __init__(
        self,
        stage: Stage,
        options: EvalOptions,
        fmt: Format,
        policy: Policy,
        *,
        rewards: Sequence[Reward] = (),
        held_out: Sequence[Problem] = (),
        environment: EnvironmentOptions | None = None,
        chooses: bool = True,
    ):
        self._stage, self._policy, self._engine = stage, policy, options.engine
        self._name = "held-out problems" if held_out else "benchmarks"
        self._metric = f"{VALIDATION}/{options.metric}" if held_out else options.metric
        self._chooses = chooses
        validation = Loaded(Benchmark(name=VALIDATION), tuple(unique(held_out)))
        place = stage.folder.path / "evaluations" / stage.name
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
            environment=environment,
        )

    @property
    def longest(self) -> int:
        """Minimum number of tokens that an engine's cache must hold."""
        return self._evaluator.longest

    def begin(self, step: int, total: int, engine: Engine | None = None) -> None:
        """Drop what a killed run measured after this step; measure the untrained policy if requested, and what a stop
        interrupted."""
        self._evaluator.begin(step)
        if step == 0 and self.is_due(0, total):
            self._measure(0, engine)
        elif self._stage.owes(self._name):
            self._is_best(step, engine)

    def is_due(self, step: int, total: int) -> bool:
        return self._evaluator.is_due(step, total)

    def after(self, step: int, total: int, engine: Engine | None = None) -> bool:
        """Whether this step was evaluated and is the best so far, if these metrics decide that."""
        return self.is_due(step, total) and self._is_best(step, engine)

    def _is_best(self, step: int, engine: Engine | None) -> bool:
        score = self._measure(step, engine)
        return self._chooses and score is not None and self._stage.note_score(step, score, self._metric)

    def _measure(self, step: int, given: Engine | None) -> float | None:
        """The score; None if a stop interrupted the evaluation."""
        with self._stage.clock.measure("evaluate"), self._open(given, step) as engine:
            values = self._stage.evaluate(self._name, step, lambda: self._evaluator.run(engine, step))
        return None if values is None else self._evaluator.score(dict(values))

    @contextmanager
    def _open(self, given: Engine | None, step: int) -> Iterator[Engine]:
        if given is not None:
            yield given
            return
        with ExitStack() as stack:
            with self._stage.waiting(self._engine.start):
                engine = make_engine(self._engine, self._policy, self._stage.seed, self._stage.emit)
                stack.callback(self._close, engine)
                engine.update_weights(step)
            yield engine

    def _close(self, engine: Engine) -> None:
        with self._stage.waiting("closing the engine"):
            engine.close()
            if self._policy.device.type == "cuda":
                torch.cuda.empty_cache()


class HeldOutLoss:
    """The loss on a stage's held-out data, every so many steps; it `chooses` the best checkpoint if no benchmark
    does."""

    def __init__(self, stage: Stage, loss: Callable[[], Mapping[str, float]], every: int, *, chooses: bool):
        self._stage, self._loss, self._every, self._chooses = stage, loss, every, chooses
        self.note = ""
        """The latest loss, for the progress line."""

    def begin(self, step: int, total: int) -> None:
        """Measure what a stop interrupted."""
        if self._stage.owes(VALIDATION):
            self._is_best(step)

    def after(self, step: int, total: int) -> bool:
        """Whether this step was measured and has the best loss so far, if that decides."""
        return self._stage.is_due(self._every, step, total) and self._is_best(step)

    def _is_best(self, step: int) -> bool:
        with self._stage.clock.measure(VALIDATION):
            results = self._stage.evaluate(VALIDATION, step, self._named)
        if results is None:
            return False
        loss = results[f"{VALIDATION}/loss"]
        self.note = f", validation {loss:.3f}"
        return self._chooses and self._stage.note_score(step, loss)

    def _named(self) -> dict[str, float]:
        return {f"{VALIDATION}/{name}": value for name, value in self._loss().items()}
