"""The text under a field is its help. It is read from the source when somebody asks, not when a class is made."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache

from lemma.config.options import Options


def meaning_of(options: type[Options], name: str) -> str:
    """The text under a field where it was declared last, as one line; nothing where its source cannot be read."""
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
