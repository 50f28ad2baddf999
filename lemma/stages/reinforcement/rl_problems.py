"""The problems of a reinforcement stage: those of its data, or its environment's own."""

from __future__ import annotations

from lemma.core.errors import UserError
from lemma.core.types import Problem
from lemma.data.load_rows import load_problems
from lemma.evaluation.benchmarks import OF_ENVIRONMENT
from lemma.stages.reinforcement.rl_options import ReinforcementOptions


def stage_problems(options: ReinforcementOptions, seed: int) -> list[Problem]:
    """The environment's own problems where the data says so, else those of the data."""
    own = own_problems(options)
    return load_problems(options.data, seed) if own is None else own


def own_problems(options: ReinforcementOptions) -> list[Problem] | None:
    """With `data: {source: environment, split: train}`, what the environment has; `count` takes the first ones."""
    if options.data.source != OF_ENVIRONMENT:
        return None
    part = options.data.part
    own = options.environment.problems(part.split)
    if own is None:
        raise UserError(
            f"environment {options.environment.name} has no problems of its own",
            fix="name a file or a dataset as `data.source`",
        )
    return list(part.of(own))[: options.data.count]
