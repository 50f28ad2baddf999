"""Checks a run's inputs before anything is trained: a missing file of a later stage must not waste an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lemma.core.errors import UserError
from lemma.data.data_options import DataOptions, journal_place
from lemma.data.sources import check_files
from lemma.evaluation.benchmarks import check_benchmark
from lemma.models.places import TINY, resolve
from lemma.runs.ingredients import models_beside
from lemma.runs.run_options import StageOptions


def check_inputs(stages: Mapping[str, StageOptions], names: Iterable[str]) -> None:
    """Refuse missing files and reward functions of these stages. The hub is not asked."""
    for name in names:
        try:
            _check(stages[name])
        except UserError as error:
            raise UserError(
                f"stage {name}: {error.problem}", file=error.file, line=error.line, fix=error.fix
            ) from error


def _check(stage: StageOptions) -> None:
    for path in models_beside(stage).values():
        if path != TINY:
            resolve(path)
    for reward in getattr(stage, "rewards", ()):
        reward.check()
    environment = getattr(stage, "environment", None)
    if environment is not None:
        environment.check()
    validation = getattr(stage, "validation", None)
    for data in (getattr(stage, "data", None), getattr(validation, "data", None)):
        if isinstance(data, DataOptions):
            for source in data.mix or [data]:
                if journal_place(source.source) is None:
                    check_files(source)
    for benchmark in stage.eval.benchmarks:
        check_benchmark(benchmark, data_dir=stage.eval.data_dir)
