"""Find an environment by a name, `path.py:Class`, a YAML file, or a mapping with its options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from lemma.config import Options
from lemma.config.document import read
from lemma.config.load import load_values
from lemma.config.registry import beside
from lemma.config.shape import Choice
from lemma.core.errors import UserError
from lemma.environments import ENVIRONMENTS, EnvironmentOptions, as_options


class _Chosen(Options):
    environment: Annotated[EnvironmentOptions, Choice(ENVIRONMENTS, by="name", as_options=as_options)]


def find_environment(spec: str | Mapping[str, Any] | EnvironmentOptions) -> EnvironmentOptions:
    """The environment, checked. For a recipe file, the environment of its first stage that has one."""
    if isinstance(spec, EnvironmentOptions):
        environment = spec
    else:
        values = _in_file(spec) if isinstance(spec, str) and spec.endswith((".yaml", ".yml")) else spec
        chosen = values if isinstance(values, str) else dict(values)
        environment = load_values(_Chosen, {"environment": chosen}, what="evaluation").environment
    if environment.is_single_turn:
        raise UserError("single_turn is no environment to play in", fix="leave the environment out")
    environment.check()
    return environment


def _in_file(path: str) -> Mapping[str, Any]:
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}", fix="write the path of a YAML file, or the name of an environment")
    data = beside(read(path, "environment").data, Path(path).parent)
    if not isinstance(data, Mapping):
        raise UserError(
            "this file holds no options of an environment", file=path, fix="write for example `name: appworld`"
        )
    if "stages" not in data:
        return data
    stages = data["stages"] if isinstance(data["stages"], Mapping) else {}
    own = [one["environment"] for one in stages.values() if isinstance(one, Mapping) and "environment" in one]
    if not own:
        raise UserError("no stage of this recipe has an environment", file=path, fix="name the environment itself")
    return {"name": own[0]} if isinstance(own[0], str) else own[0]
