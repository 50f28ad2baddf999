"""From a file and `--set` overrides to validated options, or to a sentence about everything that is wrong."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from lemma.config.document import Document, Place, read
from lemma.config.explain import explain
from lemma.config.options import Options
from lemma.config.overrides import apply
from lemma.config.registry import beside

Kind = TypeVar("Kind", bound=Options)


def load(kind: type[Kind], path: str | Path, overrides: Sequence[str] = (), what: str = "recipe") -> Kind:
    """Read a YAML file, apply the overrides and validate; every mistake is a `UserError` of one sentence."""
    document = read(path, what)
    document.data = beside(document.data, Path(path).parent)
    return _validated(kind, document, overrides)


def load_values(
    kind: type[Kind], values: Mapping[str, Any], overrides: Sequence[str] = (), what: str = "recipe"
) -> Kind:
    """The same for values from a program instead of a file."""
    document = Document(f"the {what}", copy.deepcopy(dict(values)), {(): Place(f"the {what}")})
    return _validated(kind, document, overrides)


def _validated(kind: type[Kind], document: Document, overrides: Sequence[str]) -> Kind:
    written = copy.deepcopy(document.data)
    if overrides:
        apply(document, overrides, kind)
    try:
        return kind.model_validate(document.data)
    except ValidationError as error:
        before = _mistakes(kind, written) if overrides else None
        raise explain(error, kind, document, before) from None


def _mistakes(kind: type[Options], data: Any) -> ValidationError | None:
    try:
        kind.model_validate(data)
    except ValidationError as error:
        return error
    return None
