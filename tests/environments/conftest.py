"""Worlds that break where they are told to, and end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lemma.environments import CustomWorld
from tests.environments.trouble import Worlds, write_world


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of their classes."""
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def make(place: str, tmp_path: Path) -> Iterator[Any]:
    made: list[Worlds] = []

    def make(kind: str = "Trouble", **options: Any) -> Worlds:
        spec = {"class": f"{place}:{kind}", "options": {"notes": str(tmp_path)}, "workers": 1, "reply_tokens": 8}
        made.append(Worlds(CustomWorld.model_validate(spec | options)))
        return made[-1]

    yield make
    for worlds in made:
        worlds.close()
