"""Lemma teaches language models to reason. `lemma.grade(prediction, gold)` is its answer checker.

Nothing heavy is imported here: names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lemma.grading import Verdict, grade

__all__ = ["Verdict", "grade"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import lemma.grading

        return getattr(lemma.grading, name)
    raise AttributeError(f"module 'lemma' has no attribute '{name}'")
