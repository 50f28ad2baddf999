"""Refuses options without effect, and keys that have moved, and says what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lemma.config import Options


def refuse_unused(options: Options, names: Iterable[str], where: str, instead: str = "") -> None:
    """Refuse those of the named options that differ from their defaults: `where` says why they have no effect.

    Writing out a default is allowed, because a resolved recipe writes out all of them.
    """
    fields = type(options).model_fields
    changed = [name for name in names if getattr(options, name) != fields[name].get_default(call_default_factory=True)]
    if not changed:
        return
    *others, last = changed
    which = f"{', '.join(others)} and {last} have" if others else f"{last} has"
    fix = f"remove {'them' if others else 'it'}" + (f", or {instead}" if instead else "")
    raise ValueError(f"{which} no effect {where}; {fix}")


def refuse_moved(values: Any, places: Mapping[str, str]) -> Any:
    """For a `before` validator: `places` maps each old key to its new one."""
    if isinstance(values, Mapping):
        for old, new in places.items():
            if old in values:
                *blocks, last = new.split(".")
                text = f"{last}: {_written(values[old])}"
                for block in reversed(blocks):
                    text = f"{block}: {{{text}}}"
                raise ValueError(f"{old} is now {new}; write `{text}`")
    return values


def _written(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_written(inner)}" for name, inner in value.items()) + "}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
