"""A package that is installed by its name and version, and holds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest


def pretend_installed(name: str, version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))
