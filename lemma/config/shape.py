"""The shape of a recipe: which options belong at which path, and how to say in words what may be written there."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import (
    GetCoreSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from lemma.config.options import Options
from lemma.config.registry import Registry
from lemma.core.errors import UserError


class Choice:
    """Marks a value that is one of the classes in a registry: `Annotated[Base, Choice(REGISTRY, by="name")]`.

    A mapping names its class under the key `by`; a bare word stands for a mapping with that name and nothing else.
    A plain dictionary is all there is; a `Registry` also takes `path.py:Name` and what other packages install.
    Where such values stand in a mapping, `implied` says what a key alone tells: the class, and perhaps more. A word or
    a mapping that may mean something of the user's own goes through `as_options` first.
    """

    def __init__(
        self,
        registry: Mapping[str, type[Options]],
        by: str,
        implied: Mapping[str, Mapping[str, Any]] | None = None,
        as_options: Callable[[str | Mapping[str, Any]], dict[str, Any]] | None = None,
    ):
        self.registry, self.by, self.implied, self.as_options = registry, by, dict(implied or {}), as_options

    def expand(self, value: Any, key: Any = None) -> Any:
        """The value as a mapping that names its class, as far as it can be told."""
        if isinstance(value, str) and (self.as_options is None or value in self.registry):
            return {self.by: value}
        if self.as_options is not None:
            return self.as_options(value) if isinstance(value, str | dict) else value
        told = {self.by: key} if key in self.registry else copy.deepcopy(self.implied.get(str(key), {}))
        if isinstance(value, dict) and told and value.get(self.by, told[self.by]) == told[self.by]:
            return {**told, **{name: _merged(told.get(name), given) for name, given in value.items()}}
        return value

    def find(self, tag: Any) -> type[Options] | None:
        """The class of this name: the registry's own, or one from outside where the registry is open to that."""
        if not isinstance(tag, str):
            return None
        return self.registry.find(tag) if isinstance(self.registry, Registry) else self.registry.get(tag)

    def everything(self) -> Mapping[str, type[Options]]:
        """All classes that come with Lemma."""
        return self.registry.everything() if isinstance(self.registry, Registry) else self.registry

    def names(self) -> list[str]:
        return self.registry.names() if isinstance(self.registry, Registry) else sorted(self.registry)

    def pick(self, value: Any, key: Any = None) -> type[Options] | None:
        """The class that a value chooses; None where it names none, or one that cannot be loaded."""
        value = self.expand(value, key)
        try:
            return self.find(value.get(self.by)) if isinstance(value, dict) else None
        except UserError:
            return None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        classes = {tag: handler.generate_schema(option) for tag, option in self.registry.items()}
        union = core_schema.tagged_union_schema(classes, discriminator=self.by)
        both = core_schema.no_info_wrap_validator_function(self._validate, union)
        written = core_schema.wrap_serializer_function_ser_schema(self._write, schema=union, info_arg=True)
        return core_schema.no_info_before_validator_function(self.expand, both, serialization=written)

    def _validate(self, value: Any, own: ValidatorFunctionWrapHandler) -> Any:
        """The registry's own classes by their union; a plugin's, or one from outside, by itself."""
        tag = value.get(self.by) if isinstance(value, dict) else getattr(value, self.by, None)
        if tag is None or (isinstance(tag, str) and tag in self.registry):
            return own(value)
        try:
            outside = self.find(tag)
        except UserError as error:
            raise ValueError(str(error)) from None
        return own(value) if outside is None else outside.model_validate(value)

    def _write(self, value: Any, own: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        is_own = getattr(value, self.by, None) in self.registry
        return own(value) if is_own else value.model_dump(mode=info.mode)


def _merged(told: Any, given: Any) -> Any:
    """What is told is the beginning of a mapping that says more."""
    return {**told, **given} if isinstance(told, dict) and isinstance(given, dict) else given


def annotation_of(field: FieldInfo) -> Any:
    """The whole annotation of a field, constraints included."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without its constraints, and the constraints."""
    if get_origin(annotation) is Annotated:
        bare, *extra = get_args(annotation)
        inner, more = split(bare)
        spread = (limit for part in extra for limit in (part.metadata if isinstance(part, FieldInfo) else [part]))
        return inner, (*more, *spread)
    return annotation, ()


def choice_of(annotation: Any) -> Choice | None:
    return next((extra for extra in split(annotation)[1] if isinstance(extra, Choice)), None)


def branches(annotation: Any) -> list[Any]:
    """The alternatives of a union, each with its own constraints; anything else is its own only branch."""
    bare, extra = split(annotation)
    if get_origin(bare) not in (Union, types.UnionType):
        return [annotation]
    parts = [part for alternative in get_args(bare) for part in branches(alternative)]
    return [Annotated[(part, *extra)] if extra and part is not type(None) else part for part in parts]


def options_at(annotation: Any, value: Any = None, key: Any = None) -> type[Options] | None:
    """The class whose fields may be written where this annotation stands; `value` and `key` decide a choice."""
    choice = choice_of(annotation)
    if choice is not None:
        return choice.pick(value, key)
    for branch in branches(annotation):
        bare = split(branch)[0]
        if isinstance(bare, type) and issubclass(bare, Options):
            return bare
    return None


def keys_of(options: type[Options]) -> dict[str, FieldInfo]:
    """The fields by the names that a recipe knows them by: a word of Python, such as `class`, is one by its alias."""
    return {field.alias or name: field for name, field in options.model_fields.items()}


def child(annotation: Any, value: Any, key: Any, step: str | int) -> Any | None:
    """The annotation one step further down, or None where nothing of that name can be written."""
    options = options_at(annotation, value, key)
    if options is not None:
        field = keys_of(options).get(str(step))
        return None if field is None else annotation_of(field)
    if choice_of(annotation) is not None:
        return Any
    for branch in branches(annotation):
        bare = split(branch)[0]
        origin, arguments = get_origin(bare), get_args(bare)
        if origin is dict and isinstance(step, str):
            return arguments[1]
        if origin in (list, tuple) and isinstance(step, int):
            return arguments[0] if origin is list else arguments[min(step, len(arguments) - 1)]
        if bare is Any:
            return Any
    return None


def classes_below(annotation: Any) -> list[tuple[tuple[str, ...], type[Options]]]:
    """Every class of options that this annotation allows, here or further inside, and the steps from here to there."""
    choice = choice_of(annotation)
    if choice is not None:
        return [((), options) for options in choice.everything().values()]
    classes: list[tuple[tuple[str, ...], type[Options]]] = []
    for branch in branches(annotation):
        bare = split(branch)[0]
        origin, arguments = get_origin(bare), get_args(bare)
        if origin is dict:
            classes += [(("NAME", *steps), options) for steps, options in classes_below(arguments[1])]
        elif origin is list:
            classes += [(("N", *steps), options) for steps, options in classes_below(arguments[0])]
        elif isinstance(bare, type) and issubclass(bare, Options):
            classes.append(((), bare))
    return classes


_NOUNS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    Any: ("any value", "any values"),
    type(None): ("null", "null"),
}
_BOUNDS: list[tuple[type, Callable[[Any], str]]] = [
    (annotated_types.Ge, lambda bound: f"at least {bound.ge:g}"),
    (annotated_types.Gt, lambda bound: f"above {bound.gt:g}"),
    (annotated_types.Le, lambda bound: f"at most {bound.le:g}"),
    (annotated_types.Lt, lambda bound: f"below {bound.lt:g}"),
]


def words(annotation: Any, plural: bool = False) -> str:
    """What may be written there: 'a whole number of at least 1, or null'."""
    choice = choice_of(annotation)
    if choice is not None:
        own = f"one of: {', '.join(sorted(choice.everything()))}"
        return f"{own}, or path.py:Name" if isinstance(choice.registry, Registry) else own
    parts = branches(annotation)
    if len(parts) > 1:
        named = [words(part) for part in parts]
        several = any(" and " in part or ", " in part for part in named[:-1])
        return f"{', '.join(named[:-1])}{',' if several else ''} or {named[-1]}"
    return _single(parts[0], plural)


def _single(annotation: Any, plural: bool) -> str:
    bare, extra = split(annotation)
    origin, arguments = get_origin(bare), get_args(bare)
    if origin is Literal:
        names = [str(name) for name in arguments]
        return f"'{names[0]}'" if len(names) == 1 else "one of: " + ", ".join(names)
    if origin is list:
        return f"a list of {words(arguments[0], plural=True)}"
    if origin is tuple:
        return f"a list of {len(arguments)} {words(arguments[0], plural=True)}"
    if origin in (dict, Mapping) or bare is dict or (isinstance(bare, type) and issubclass(bare, Options)):
        return "mappings" if plural else "a mapping"
    noun = _NOUNS.get(bare, (str(bare), str(bare)))[plural]
    if any(isinstance(limit, annotated_types.MinLen) for limit in extra) and bare is str:
        noun += " that is not empty"
    limits = [say(limit) for limit in extra for kind, say in _BOUNDS if isinstance(limit, kind)]
    if not limits:
        return noun
    return f"{noun} {'of ' if limits[0].startswith('at') else ''}{' and '.join(limits)}"
