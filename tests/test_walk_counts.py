"""How much code a step, a training, an evaluation and an episode enter: less than before, or more on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.walks import COUNTS, WALKS, counted, walked

ALLOWED = json.loads(COUNTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", list(WALKS))
def test_a_walk_enters_no_more_than_before(name: str, tmp_path: Path) -> None:
    for walk, places in walked(name, tmp_path).items():
        counts = counted({(file, function) for file, function in places})
        assert counts["files"] <= ALLOWED[walk]["files"], COME_TO_STAY
        assert counts["lines"] <= ALLOWED[walk]["lines"] + SPARE_LINES, COME_TO_STAY
        assert counts["functions"] <= ALLOWED[walk]["functions"] + SPARE_FUNCTIONS, COME_TO_STAY


# What kind of CPU this is, and which thread comes first, decides about a few functions.
SPARE_LINES, SPARE_FUNCTIONS = 200, 8
COME_TO_STAY = "say in the commit why more code is entered, and run: python -m tests.walks --update"
