"""Real benchmark rows, traces and rollouts outside the repository, for the tests that `make test-data` runs."""

from __future__ import annotations

import os
from pathlib import Path

SHARED = Path(os.environ.get("LEMMA_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared").resolve()


def shared(*parts: str) -> Path:
    """A file or folder of them; only tests marked `realdata` ask for it."""
    path = SHARED.joinpath(*parts)
    assert path.exists(), f"{path} is not there; LEMMA_TEST_DATA names the folder"
    return path
