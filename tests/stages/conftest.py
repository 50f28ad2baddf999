"""Supervised runs for the tests of stages and of the run around them; other tests have worlds of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.sft_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A run of six steps that nothing disturbed."""
    world = World(tmp_path_factory.mktemp("finished"))
    assert world.train(world.recipe()) == 0
    return world
