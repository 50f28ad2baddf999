"""Rewards: what a completion is worth. One file per family; several combine as a weighted sum; this is the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lemma.config.registry import Registry, from_options, is_place, load_place
from lemma.core.errors import UserError, nearest
from lemma.rewards.combine import Scored, combine, distributions
from lemma.rewards.correctness import Accuracy, FormatKept, Graded
from lemma.rewards.custom import Custom, is_for_trl
from lemma.rewards.episodes import EnvironmentReward
from lemma.rewards.failures import RewardFailed
from lemma.rewards.foreign_functions import OpenRlhfFunction, VerlFunction, owner_of
from lemma.rewards.lengths import Length, Repetition, SoftOverlong
from lemma.rewards.model import RewardModel
from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput
from lemma.rewards.think import R1ZeroReward, ThinkAnswerFormat, ThinkFormat
from lemma.rewards.trl_function import TrlFunction
from lemma.rewards.working_out_rewards import AnswerReward, ApproximateFormat, ExactFormat, Numbers
from lemma.rewards.xml_rewards import Correctness, Integer, SoftFormat, StrictFormat, TagCount

REWARDS: Registry[type[Reward]] = Registry(
    "rewards",
    Reward,
    {
        "accuracy": Accuracy,
        "format": FormatKept,
        "graded": Graded,
        "correctness": Correctness,
        "integer": Integer,
        "strict_format": StrictFormat,
        "soft_format": SoftFormat,
        "tag_count": TagCount,
        "exact_format": ExactFormat,
        "approximate_format": ApproximateFormat,
        "answer": AnswerReward,
        "numbers": Numbers,
        "r1_zero": R1ZeroReward,
        "think_format": ThinkFormat,
        "think_answer_format": ThinkAnswerFormat,
        "soft_overlong": SoftOverlong,
        "repetition": Repetition,
        "length": Length,
        "reward_model": RewardModel,
        "environment": EnvironmentReward,
        "custom": Custom,
        "trl": TrlFunction,
        "verl": VerlFunction,
        "openrlhf": OpenRlhfFunction,
    },
)

__all__ = [
    "REWARDS",
    "Reward",
    "RewardFailed",
    "RewardInput",
    "Scored",
    "as_options",
    "combine",
    "distributions",
    "make_reward",
]


def as_options(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """A reward as a mapping of name and options; a function in a file becomes `custom`, or `trl`, `verl` or `openrlhf`
    if its signature is theirs.

    A file that cannot be read is assumed to contain a function: the reward says what is wrong when it is checked.
    """
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    for owner in ("trl", "verl", "openrlhf"):
        if owner in options and "name" not in options:
            return {"name": owner, "function": options.pop(owner), **options}
    place = options.get("name")
    if not isinstance(place, str) or not (is_place(place) or place.endswith(".py")):
        return options
    try:
        entry = load_place(place) if is_place(place) else None
    except UserError:
        entry = None
    if isinstance(entry, type):
        return options
    owner = owner_of(entry) or ("trl" if is_for_trl(entry) else "custom")
    return {**options, "name": owner, "function": place}


def make_reward(spec: str | Mapping[str, Any] | Reward) -> Reward:
    """A reward from its name, from `path.py:Name`, or from a mapping of name and options as a recipe writes it."""
    if isinstance(spec, Reward):
        return spec
    options = as_options(spec)
    name = str(options.get("name", ""))
    kind = REWARDS.find(name)
    if kind is None:
        raise UserError(f"there is no reward '{name}'", fix=nearest(name, REWARDS.names()))
    return from_options(kind, options, f"reward {name}")
