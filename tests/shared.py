"""The folder `shared` beside the checkout: data that is not part of the project."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(*parts: str) -> Path:
    """A file or folder of the shared data; the test that asks for it skips where there is none."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"shared data absent: {'/'.join(parts)}")
    return path
