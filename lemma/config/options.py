"""The base of everything that a recipe can say, and what options without effect are told. Each component declares its
options next to its code."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Options(BaseModel):
    """Typed options: unknown keys are errors, values are fixed once read, and the text under a field is its help. A
    class is compiled when it is first used: a recipe uses few of those that are declared."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`lr: true` is a slip and not the number 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _leaves(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and not kinds & {bool, Any}:
                raise PydanticCustomError("bool_for_number", "a number is wanted here")
        return value


def _leaves(annotation: Any) -> set[Any]:
    """The plain types that an annotation is made of."""
    arguments = get_args(annotation)
    return {leaf for part in arguments for leaf in _leaves(part)} if arguments else {annotation}


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


def meaning_of(options: type[Options], name: str) -> str:
    """The text under a field where it was declared last, as one line; nothing where its source cannot be read. It is
    read when somebody asks for it."""
    said = options.model_fields[name].description
    if said is None:
        home = next(kind for kind in options.__mro__ if name in inspect.get_annotations(kind))
        said = _texts(home.__module__).get((home.__qualname__.replace("<locals>.", ""), name), "")
    return " ".join(said.split())


@cache
def _texts(module: str) -> dict[tuple[str, str], str]:
    """Every text that follows an annotated name, by the class and the name."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, KeyError, TypeError, SyntaxError):
        return {}
    texts: dict[tuple[str, str], str] = {}
    _collect(tree, "", texts)
    return texts


def _collect(inside: ast.AST, path: str, texts: dict[tuple[str, str], str]) -> None:
    for part in ast.iter_child_nodes(inside):
        if isinstance(part, ast.ClassDef | ast.FunctionDef):
            name = f"{path}.{part.name}".lstrip(".")
            if isinstance(part, ast.ClassDef):
                texts |= {(name, field): text for field, text in _fields(part)}
            _collect(part, name, texts)


def _fields(declared: ast.ClassDef) -> list[tuple[str, str]]:
    pairs = zip(declared.body, declared.body[1:], strict=False)
    return [
        (field.target.id, under.value.value)
        for field, under in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant) and isinstance(under.value.value, str)
    ]
