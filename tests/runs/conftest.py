"""The supervised runs of tests/stages, for the tests of what is around them."""

from __future__ import annotations

from tests.stages.conftest import finished, world

__all__ = ["finished", "world"]
