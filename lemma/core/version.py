"""Which Lemma this is, and which versions of other packages are there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def lemma_version() -> str:
    """The version that is installed; `source` where the code runs from a folder that nothing installed."""
    return installed_version("lemma-reasoning") or "source"


def installed_version(name: str) -> str | None:
    """The version of a package by the name it is installed under; None where it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
