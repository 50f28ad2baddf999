"""A folder with a good recipe, for the tests of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.refusals import GOOD


@pytest.fixture
def recipe_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(GOOD, encoding="utf-8")
    return tmp_path
