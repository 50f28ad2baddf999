"""The problems of a reinforcement stage: those of its data, or its environment's own."""

from __future__ import annotations

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, Problem, problem_of
from lemma.data.load_rows import GRADED, load_problems, load_rows
from lemma.data.readers import Item
from lemma.evaluation.benchmarks import OF_ENVIRONMENT
from lemma.formats.turns import first_asked
from lemma.rewards.combine import labels
from lemma.stages.reinforcement.rl_options import ReinforcementOptions


def stage_problems(options: ReinforcementOptions, seed: int) -> list[Problem]:
    """The environment's own problems if the data says so, else those of the data; in an environment, in their state
    before the first response."""
    own, keep = own_problems(options), needs_columns(options)
    if own is not None:
        return own
    if options.environment.is_single_turn:
        return load_problems(options.data, seed, keep_columns=keep, wanted=gold_wanted(options))
    return [asked_first(row) for row in load_rows(options.data, seed, keep_columns=keep)]


def gold_wanted(options: ReinforcementOptions) -> str | None:
    """What every row must have, and the reward that needs it; None if no reward reads a gold answer."""
    if not options.environment.is_graded:
        return None
    named = zip(labels(options.rewards), options.rewards, strict=True)
    return next((f"{GRADED}, which the reward {name} needs" for name, reward in named if reward.needs_gold), None)


def asked_first(item: Item) -> Problem:
    """The problem of a row, without the rest of its conversation."""
    return first_asked(item) if isinstance(item, Demonstration) else problem_of(item)


def needs_columns(options: ReinforcementOptions) -> bool:
    """Whether the environment or a reward reads columns that no reader knows."""
    return options.environment.needs_columns or any(getattr(one, "needs_columns", False) for one in options.rewards)


def own_problems(options: ReinforcementOptions) -> list[Problem] | None:
    """With `data: {source: environment, split: train}`, the environment's problems; `count` takes the first ones."""
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
