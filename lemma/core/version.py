"""Which Lemma this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def lemma_version() -> str:
    """The version that is installed; `source` where the code runs from a folder that nothing installed."""
    try:
        return version("lemma-reasoning")
    except PackageNotFoundError:
        return "source"
