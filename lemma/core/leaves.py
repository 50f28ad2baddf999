"""Nested settings, laid flat so that two of them can be compared key by key."""

from __future__ import annotations

from typing import Any


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as `a.b.c: value`."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    values: dict[str, Any] = {}
    for name, part in tree.items():
        values |= leaves(part, f"{prefix}.{name}" if prefix else name)
    return values


def in_yaml(value: Any) -> str:
    """A value as a recipe spells it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
