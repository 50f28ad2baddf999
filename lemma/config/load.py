"""From a file and `--set` overrides to validated options, or to a sentence about everything that is wrong."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import ValidationError

from lemma.config.document import Document, KeyPath, Place, parse_value, read
from lemma.config.explain import dotted, explain, show, unknown
from lemma.config.options import Options
from lemma.config.registry import beside
from lemma.config.shape import branches, child, choice_of, keys_of, options_at, split
from lemma.core.errors import UserError, nearest

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


def apply(document: Document, overrides: Sequence[str], root: type[Options]) -> None:
    """Put every override into the document, in order; the last one wins."""
    for order, text in enumerate(overrides, start=1):
        _apply_one(document, text, root, order)


def _apply_one(document: Document, text: str, root: type[Options], order: int) -> None:
    place = Place(f"--set {text}", order=order)
    name, equals, written = text.partition("=")
    steps = name.strip().split(".")
    if not equals or not all(steps):
        raise UserError("this is not KEY=VALUE", file=place.file, fix="write it like `--set run.seed=1`")
    try:
        value = parse_value(written)
    except UserError as error:
        raise UserError(error.problem, file=place.file, fix="repair the value or put it in quotes") from None
    target, path = _descend(document, steps, root, place)
    last = _step(target, path, steps[-1], place)
    target[last] = value
    path = (*path, last)
    for below in list(document.below(path)):
        del document.places[below]
    document.places[path] = place


def _descend(document: Document, steps: list[str], root: type[Options], place: Place) -> tuple[Any, KeyPath]:
    """The mapping or list that holds the last step, made on the way where it is not there yet; checks every name."""
    here: Any = document.data
    annotation: Any = root
    key: Any = None
    path: KeyPath = ()
    for position, written in enumerate(steps):
        _check_name(annotation, here, key, written, path, root, place)
        step = _step(here, path, written, place)
        holder = options_at(annotation, here, key)
        annotation = child(annotation, here, key, step)
        if annotation is None:
            raise UserError(
                f"nothing stands below '{dotted(path)}'", file=place.file, fix=f"set '{dotted(path)}' itself"
            )
        if position == len(steps) - 1:
            return here, path
        path = (*path, step)
        value = here.get(step) if isinstance(here, dict) else here[step]
        value = _default_choice(annotation, holder, written) if value is None else value
        here[step] = _container(value, annotation, step, path, place)
        here, key = here[step], step
    raise AssertionError("a path has at least one step")


def _default_choice(annotation: Any, holder: type[Options] | None, name: str) -> Any:
    """A choice that the recipe leaves open, as the one it is by default."""
    choice = choice_of(annotation)
    if choice is None or holder is None:
        return None
    default = keys_of(holder)[name].get_default(call_default_factory=True)
    return {choice.by: getattr(default, choice.by)} if isinstance(default, Options) else None


def _container(value: Any, annotation: Any, key: Any, path: KeyPath, place: Place) -> Any:
    """The value at an inner step of a path, as something that can hold keys."""
    choice = choice_of(annotation)
    if choice is not None:
        value = choice.expand({} if value is None else value, key)
    if value is None:
        lists = any(get_origin(split(branch)[0]) in (list, tuple) for branch in branches(annotation))
        return [] if lists else {}
    if not isinstance(value, dict | list):
        raise UserError(
            f"nothing stands below '{dotted(path)}', which is {show(value)}",
            file=place.file,
            fix=f"set '{dotted(path)}' itself",
        )
    return value


def _step(here: Any, path: KeyPath, written: str, place: Place) -> str | int:
    """A step as the container wants it: a name in a mapping, a number in a list."""
    if not isinstance(here, list):
        return written
    if not here:
        raise UserError(
            f"'{dotted(path)}' is an empty list", file=place.file, fix=f"set the whole of it: {dotted(path)}=[...]"
        )
    if not written.isdecimal() or int(written) >= len(here):
        last = len(here) - 1
        numbers = "0" if last == 0 else f"a number from 0 to {last}"
        raise UserError(f"'{dotted(path)}' has no item '{written}'", file=place.file, fix=f"write {numbers}")
    return int(written)


def _check_name(
    annotation: Any, here: Any, key: Any, written: str, path: KeyPath, root: type[Options], place: Place
) -> None:
    """Refuse a name that cannot stand here, and offer the nearest that can."""
    options = options_at(annotation, here, key)
    if options is not None and written not in keys_of(options):
        name = dotted((*path, written))
        raise UserError(f"unknown key '{name}'", file=place.file, fix=unknown(written, path, options, root))
    bare, _ = split(annotation)
    of_choices = get_origin(bare) is dict and choice_of(bare.__args__[1]) is not None
    if of_choices and isinstance(here, dict) and written not in here:
        name = dotted((*path, written))
        raise UserError(f"there is no '{name}'", file=place.file, fix=nearest(written, here))
