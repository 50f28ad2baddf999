"""One crew of ranks for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.crew import Crew


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = Crew(tmp_path_factory.mktemp("crew"))
    yield made
    made.close()
