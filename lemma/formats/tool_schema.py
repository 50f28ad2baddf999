"""Tools that a model can call: name, description and a JSON schema of the arguments, made from Python functions."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
ARGUMENTS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s+\**(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
SECTION = re.compile(r"^(Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Tool:
    """The description of a function that a model can call. `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}}, hash=False)

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Tool:
        """From the signature and the docstring; `Args:` in it describes the arguments."""
        description, words = _documented(inspect.getdoc(function) or "")
        try:
            hints = typing.get_type_hints(function)
        except (NameError, TypeError):  # an annotation that cannot be resolved here: any value will do
            hints = {}
        properties: dict[str, Any] = {}
        required = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            # Some chat templates need a description, even an empty one.
            described = {"description": words.get(parameter.name, "")}
            hint = hints.get(parameter.name, Any)
            # `limit: int = None` means that it may be None.
            properties[parameter.name] = schema_of(hint if parameter.default is not None else hint | None) | described
            if parameter.default is parameter.empty:
                required.append(parameter.name)
        schema = {"type": "object", "properties": properties} | ({"required": required} if required else {})
        return cls(name or function.__name__, description, schema)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Tool:
        """From the form that chat templates take: `{"type": "function", "function": {...}}`, or its inner part."""
        inner = given.get("function", given)
        parameters = inner.get("parameters") or {"type": "object", "properties": {}}
        return cls(str(inner["name"]), str(inner.get("description") or ""), parameters)

    def as_dict(self) -> dict[str, Any]:
        """In the form that chat templates take."""
        inner = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": inner}

    def checked(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The arguments converted to the schema, and a sentence that says what is wrong with them, or none."""
        known = self.parameters.get("properties") or {}
        taken = ", ".join(known) or "none"
        fixed = dict(arguments)
        for name, value in arguments.items():
            if name not in known:
                if self.parameters.get("additionalProperties"):
                    continue
                return fixed, f"{self.name} has no argument '{name}'; it takes: {taken}"
            kinds = _kinds(known[name])
            if value is None and "null" in kinds:
                continue
            if "integer" in kinds and isinstance(value, float) and value.is_integer():
                fixed[name] = value = int(value)
            if kinds and not any(_is_kind(value, kind) for kind in kinds):
                return fixed, f"argument '{name}' of {self.name} must be of type {' or '.join(kinds)}"
            options = known[name].get("enum")
            if options and value not in options:
                return fixed, f"argument '{name}' of {self.name} must be one of {', '.join(map(str, options))}"
        missing = [name for name in self.parameters.get("required", ()) if name not in arguments]
        return fixed, f"{self.name} needs the argument '{missing[0]}'" if missing else ""


def schema_of(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint; empty, which allows everything, for a type that JSON does not have."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if origin is Literal:
        known = [value for value in inside if value is not None]
        return schema_of(type(known[0])) | {"enum": known} | _nullable(None in inside) if known else {}
    if origin is typing.Annotated:
        return schema_of(inside[0])
    if origin in (typing.Union, types.UnionType):
        some = [schema_of(one) for one in inside if one is not type(None)]
        if not all("type" in one for one in some):
            return {}
        may_be_null = _nullable(type(None) in inside)
        if len(some) == 1:
            return some[0] | may_be_null
        names = [one["type"] for one in some]
        return {"type": list(dict.fromkeys(names)), **may_be_null} if all(isinstance(n, str) for n in names) else {}
    if origin in (list, tuple, set, frozenset) or getattr(origin, "__name__", "") in ("Sequence", "Iterable"):
        items = schema_of(inside[0]) if inside else {}
        return {"type": "array"} | ({"items": items} if items else {})
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return {"type": "object"}
    return {}


def _nullable(is_so: bool) -> dict[str, bool]:
    """As transformers writes a type that allows None: chat templates read `type` as one name."""
    return {"nullable": True} if is_so else {}


def _documented(doc: str) -> tuple[str, dict[str, str]]:
    """The description in a docstring, and that of each argument."""
    head, *rest = ARGUMENTS.split(doc, maxsplit=1)
    head = SECTION.split(head, maxsplit=1)[0]
    words: dict[str, str] = {}
    last = None
    for line in SECTION.split(rest[0], maxsplit=1)[0].splitlines() if rest else ():
        match = ARGUMENT.match(line)
        if match:
            last = match[1]
            words[last] = match[2].strip()
        elif last is not None and line.strip():
            words[last] = f"{words[last]} {line.strip()}".strip()
    return " ".join(head.split()), words


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    given = schema.get("type")
    kinds = [given] if isinstance(given, str) else list(given or ())
    kinds += ["null"] if kinds and schema.get("nullable") else []
    return [kind for kind in kinds if kind in KINDS]


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, KINDS[kind])
