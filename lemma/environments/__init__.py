"""Environments: what replies to the policy between its turns, and scores the episode at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lemma.config.registry import Registry, is_place, load_place
from lemma.core.errors import UserError
from lemma.core.types import Outcome
from lemma.environments.custom_world import CustomWorld
from lemma.environments.environment import (
    Action,
    Attempt,
    Environment,
    EnvironmentOptions,
    Observation,
    SingleTurn,
    WorldGone,
)
from lemma.environments.gateway import Gateway
from lemma.environments.higher_lower import HigherLower
from lemma.environments.own_tools import OwnTools
from lemma.environments.python_tool import PythonTools

if TYPE_CHECKING:
    from lemma.plugins.appworld import AppWorldOptions
    from lemma.plugins.openenv import OpenEnv
    from lemma.plugins.reasoning_gym import ReasoningGym
    from lemma.plugins.trl_world import TrlWorld


def _reasoning_gym() -> type[EnvironmentOptions]:
    from lemma.plugins.reasoning_gym import ReasoningGym

    return ReasoningGym


def _openenv() -> type[EnvironmentOptions]:
    from lemma.plugins.openenv import OpenEnv

    return OpenEnv


def _trl() -> type[EnvironmentOptions]:
    from lemma.plugins.trl_world import TrlWorld

    return TrlWorld


def _appworld() -> type[EnvironmentOptions]:
    from lemma.plugins.appworld import AppWorldOptions

    return AppWorldOptions


ENVIRONMENTS: Registry[type[EnvironmentOptions]] = Registry(
    "environments",
    EnvironmentOptions,
    {
        "single_turn": SingleTurn,
        "higher_lower": HigherLower,
        "python": PythonTools,
        "tools": OwnTools,
        "custom": CustomWorld,
        "gateway": Gateway,
    },
    {"reasoning_gym": _reasoning_gym, "openenv": _openenv, "trl": _trl, "appworld": _appworld},
)


def as_options(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """An environment as a mapping of name and options; a plain class of a file becomes the class of `custom`."""
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    place = options.get("name")
    if not isinstance(place, str) or not is_place(place):
        return options
    try:
        entry = load_place(place)
    except UserError:
        entry = None
    is_options = isinstance(entry, type) and issubclass(entry, EnvironmentOptions)
    return options if is_options else {**options, "name": "custom", "class": place}


RENAMED = {"Reply": "Observation", "Utterance": "Action"}


_OF_PLUGINS = {"OpenEnv": _openenv, "ReasoningGym": _reasoning_gym, "TrlWorld": _trl, "AppWorldOptions": _appworld}


def __getattr__(name: str) -> type[EnvironmentOptions]:
    if name in _OF_PLUGINS:
        return _OF_PLUGINS[name]()
    if name in RENAMED:
        raise UserError(f"lemma.environments.{name} is called {RENAMED[name]} now", fix=f"write `{RENAMED[name]}`")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ENVIRONMENTS", "Action", "AppWorldOptions", "Attempt", "CustomWorld", "Environment", "EnvironmentOptions",
    "Gateway", "HigherLower", "Observation", "OpenEnv", "Outcome", "OwnTools", "PythonTools", "ReasoningGym",
    "SingleTurn", "TrlWorld", "WorldGone", "as_options",
]  # fmt: skip
