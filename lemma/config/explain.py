"""From pydantic's errors to one sentence each: where, what is wrong, what to write instead."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lemma.config.document import Document, KeyPath, Place
from lemma.config.foreign_names import ALGORITHMS, CONVERSIONS, KINDS, LOSSES, REASONS, SYNONYMS
from lemma.config.options import Options
from lemma.config.shape import (
    Choice,
    annotation_of,
    branches,
    child,
    choice_of,
    classes_below,
    keys_of,
    options_at,
    split,
    words,
)
from lemma.core.errors import SeveralErrors, UserError, nearest

# Mistakes of one recipe that are told.
MOST = 20
# The one option that people mean who write `model: NAME` or `validation: 0.1` in the place of a mapping.
MAIN_TEXT = {"model": "path", "data": "source"}
MAIN_NUMBER = {"validation": "share", "optim": "lr", "lora": "r"}


def explain(
    error: ValidationError, root: type[Options], document: Document, before: ValidationError | None = None
) -> UserError:
    """Every mistake, by line, as a sentence that repairs it; of very many, the first ones and how many more there are.

    `before` is what was wrong before `--set`: those mistakes are the file's.
    """
    old = {(details["loc"], details["msg"]) for details in before.errors()} if before is not None else set()
    errors: dict[KeyPath, ErrorDetails] = {}
    for details in error.errors(include_url=False):
        errors.setdefault(_user_path(details, root, document.data), details)
    paths = [path for path in errors if not any(other[: len(path)] == path and other != path for other in errors)]
    sentences = sorted(
        ((_place(document, path, errors[path], old), *_sentence(path, errors[path], root, document)) for path in paths),
        key=lambda sentence: sentence[0].sort_key(),
    )
    told = [
        UserError(problem, file=place.file, line=place.line, fix=fix or None)
        for place, problem, fix in sentences[:MOST]
    ]
    more = len(sentences) - len(told)
    if more:
        told.append(UserError(f"and {more} more mistake{'s' if more > 1 else ''}", file=sentences[MOST][0].file))
    return SeveralErrors(told) if len(told) > 1 else told[0]


def dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def show(value: Any) -> str:
    """A value the way a recipe would spell it, cut where it is long."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        text = f"[{', '.join(map(show, value))}]"
        return text if len(text) <= 60 else "a long list"
    text = f"'{value}'" if isinstance(value, str) else f"{value}"
    return text if len(text) <= 60 else text[:57] + "..." + text[-1]


def unknown(name: str, path: KeyPath, options: type[Options], root: type[Options]) -> str:
    """What to write instead of a key that the `options` at `path` do not have."""
    if name in REASONS:
        return REASONS[name]
    instead = _instead(name, path, options, root)
    ours = re.search(r"(\w+)'\??$", instead)
    conversion = CONVERSIONS.get((name, ours[1])) if ours else None
    return f"{instead} ({conversion})" if conversion else instead


def _instead(name: str, path: KeyPath, options: type[Options], root: type[Options]) -> str:
    fields = list(keys_of(options))
    meanings = [tuple(meant.split(".")) for meant in SYNONYMS.get(name, (name,))]
    below = next((spot for meant in meanings if len(meant) > 1 for spot, _ in spots(options, meant)), ())
    if below:
        return f"write it as '{dotted((*path, *below))}'"
    known = [meant[-1] for meant in [*meanings, ("path" if name == "name" else name,)] if meant[-1] in fields]
    if known:
        return f"did you mean '{known[0]}'?"
    close = get_close_matches(name, fields, n=1, cutoff=0.7)
    if close:
        return f"did you mean '{close[0]}'?"
    inside = next((spot for meant in [(name,), *meanings] for spot, _ in spots(options, meant)), ())
    everywhere = [found for meant in meanings for found in spots(root, meant)] if path else []
    same = [other for spot, other in everywhere if _is_place(path, spot[:-1])]
    others = sorted(filter(None, map(_called, same)))
    if others:
        return f"remove it: it is an option of {', '.join(others)}"
    outside = everywhere[0][0] if everywhere and not same else ()
    if inside and (not outside or len(inside) <= len(outside)):
        return f"write it as '{dotted((*path, *inside))}'"
    if outside:
        return f"it belongs at '{dotted(outside)}'"
    close = get_close_matches(name, fields, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    own = f"it as '{dotted((*path, 'options', name))}' if what you named takes it, or " if "options" in fields else ""
    return f"write {own}{_one_of(sorted(fields))}"


def _is_place(path: KeyPath, spot: KeyPath) -> bool:
    """Whether a path as the user wrote it leads to this spot, in which NAME and N stand for any step."""
    return len(path) == len(spot) and all(b in ("NAME", "N", a) for a, b in zip(path, spot, strict=True))


def _called(options: type[Options]) -> str | None:
    """The name by which a recipe chooses these options among others; None for those that it does not choose."""
    field = options.model_fields.get("name") or options.model_fields.get("kind")
    return None if field is None else str(field.default)


def spots(root: type[Options], ending: KeyPath) -> Iterator[tuple[KeyPath, type[Options]]]:
    """Paths below `root`, nearest first, that end so and lead to a field, and the options it is one of."""
    queue: deque[tuple[KeyPath, type[Options]]] = deque([((), root)])
    seen = {root}
    while queue:
        path, options = queue.popleft()
        if path and ending[-1] in keys_of(options) and (*path, ending[-1])[-len(ending) :] == ending:
            yield (*path, ending[-1]), options
        for field_name, field in keys_of(options).items():
            for steps, below in classes_below(annotation_of(field)):
                if below not in seen:
                    seen.add(below)
                    queue.append(((*path, field_name, *steps), below))


def _user_path(details: ErrorDetails, root: type[Options], data: Any) -> KeyPath:
    """The place of an error as the user wrote it, without the names of union branches that pydantic puts in."""
    path: list[str | int] = []
    here = data
    location = details["loc"]
    for index, step in enumerate(location):
        inside = (isinstance(here, dict) and step in here) or (
            isinstance(here, list) and isinstance(step, int) and step < len(here)
        )
        if inside:
            here = here[step]
            path.append(step)
        elif index == len(location) - 1 and details["type"] == "missing" and isinstance(here, dict):
            path.append(step)
    return tuple(path)


def _place(document: Document, path: KeyPath, details: ErrorDetails, old: set[Any]) -> Place:
    """Where to point: for things that do not fit together, at the `--set` that brought the last of them in, of those
    that the message names if it names any."""
    if details["type"] == "value_error" and (details["loc"], details["msg"]) not in old:
        words = set(re.findall(r"\w+", details["msg"]))
        places = {below: document.places[below] for below in document.below(path)}
        named = {below: place for below, place in places.items() if place.order and words & set(map(str, below[-1:]))}
        latest = max((named or places).values(), key=lambda place: place.order, default=None)
        if latest is not None and latest.order:
            return latest
    if details["type"] == "union_tag_invalid":
        return document.place((*path, details["ctx"]["discriminator"].strip("'")))
    return document.place(path)


def locate(root: type[Options], data: Any, path: Sequence[str | int]) -> tuple[Any, Any, Any]:
    """The annotation, the value and the key at a path; the annotation is None where the path leads nowhere."""
    annotation: Any = root
    key: Any = None
    for step in path:
        annotation = child(annotation, data, key, step)
        if annotation is None:
            return None, None, step
        inside = (isinstance(data, dict) and step in data) or (isinstance(data, list) and isinstance(step, int))
        data = data[step] if inside else None
        key = step
    return annotation, data, key


def _sentence(path: KeyPath, details: ErrorDetails, root: type[Options], document: Document) -> tuple[str, str]:
    """What is wrong and what to write instead."""
    kind, context = details["type"], details.get("ctx", {})
    name = dotted(path)
    if kind == "value_error":
        problem, _, fix = str(context["error"]).partition("; ")
        return (f"{name}: {problem}" if name else problem), fix
    if kind == "extra_forbidden":
        options = options_at(*locate(root, document.data, path[:-1])) or root
        return f"unknown key '{name}'", unknown(str(path[-1]), path[:-1], options, root)
    if details["loc"][-1] == "[key]" and kind == "literal_error":
        known = re.findall(r"'(\w+)'", context["expected"])
        return f"'{path[-1]}' cannot be a name in '{dotted(path[:-1])}'", _loss_or_nearest(str(path[-1]), known)
    if details["loc"][-1] == "[key]":
        return f"'{path[-1]}' cannot be a name in '{dotted(path[:-1])}'", "use letters, digits, _ and - only"
    annotation, value, _ = locate(root, document.data, path)
    if kind == "missing" and path[-1:] == details["loc"][-1:]:
        return f"'{name}' is missing", f"add it: {words(annotation)}"
    choice = choice_of(annotation)
    if choice is not None and value is not None:
        return _wrong_choice(name, choice, value)
    return _wrong_value(path, kind, annotation, value, details)


def _wrong_choice(name: str, choice: Choice, value: Any) -> tuple[str, str]:
    """A value that does not name one of the classes it could be."""
    tags = choice.names()
    if isinstance(value, str):
        return f"'{name}' cannot be {show(value)}", _repair_text(value) or _other_name(value, tags)
    if not isinstance(value, dict):
        return f"'{name}' cannot be {show(value)}", "write " + _one_of(tags)
    if choice.by in value:
        tag = value[choice.by]
        if choice.by == "kind" and isinstance(tag, str) and tag in KINDS:
            return f"'{name}.kind' cannot be {show(tag)}", f"write `kind: {KINDS[tag]}` and `algorithm: {tag}`"
        return f"'{name}.{choice.by}' cannot be {show(tag)}", _other_name(str(tag), tags)
    stage = name.rpartition(".")[2].lower()
    for kind, algorithms in ALGORITHMS.items() if choice.by == "kind" else ():
        if stage in algorithms:
            return f"'{name}' does not say its kind", f"add `kind: {kind}` and `{algorithms[stage]}`"
    example = f"`{choice.by}: {tags[0]}`" if len(tags) == 1 else f"`{choice.by}:` and {_one_of(tags)}"
    return f"'{name}' does not say its {choice.by}", f"add {example}"


def _other_name(name: str, tags: Sequence[str]) -> str:
    """What to write where one of `tags` is asked for; for an algorithm, where it is one of another kind or a loss."""
    kind = next((KINDS[tag] for tag in tags if tag in KINDS), None)
    instead = ALGORITHMS.get(kind or "", {}).get(name.lower())
    if instead is not None:
        return f"write `{instead}`"
    elsewhere = next(
        ((other, known[name.lower()]) for other, known in ALGORITHMS.items() if name.lower() in known), None
    )
    if kind is not None and elsewhere is not None:
        return f"it belongs to stages of `kind: {elsewhere[0]}`; write that, and `{elsewhere[1]}`"
    if kind is not None and name in KINDS:
        return f"{name} is an algorithm of stages of `kind: {KINDS[name]}`; write that"
    return nearest(name, tags)


def _loss_or_nearest(name: str, known: Sequence[str]) -> str:
    return f"write `{LOSSES[name]}`" if LOSSES.get(name) in known else nearest(name, known)


def _one_of(names: Sequence[str]) -> str:
    return "one of: " + ", ".join(names)


def _repair_text(text: str) -> str:
    """What to write for a line like `steps:10`, which YAML takes for one word."""
    return "put a space after the ':'" if re.match(r"[A-Za-z_]\w*:\S", text) else ""


def _as_mapping(path: KeyPath, value: Any, options: type[Options]) -> str:
    """The mapping that a bare text or number stands for, where that is plain."""
    main = (MAIN_TEXT if isinstance(value, str) else MAIN_NUMBER).get(str(path[-1])) if path else None
    is_plain = main in options.model_fields and not isinstance(value, bool | list)
    return f"write `{path[-1]}: {{{main}: {value}}}`" if is_plain else ""


def _wrong_value(path: KeyPath, kind: str, annotation: Any, value: Any, details: ErrorDetails) -> tuple[str, str]:
    problem = f"'{dotted(path)}' cannot be {show(value)}"
    if annotation is None:
        return problem, details["msg"]
    below = [options for steps, options in classes_below(annotation) if not steps]
    if below and not isinstance(value, dict):
        if value is None:
            return f"'{dotted(path)}' is empty", "write something under it or delete the line"
        fix = _repair_text(value) if isinstance(value, str) else ""
        fix = fix or _as_mapping(path, value, below[0])
        return problem, fix or f"write a mapping with any of: {', '.join(keys_of(below[0]))}"
    literals = [bare for bare, _ in map(split, branches(annotation)) if get_origin(bare) is Literal]
    names = [str(name) for literal in literals for name in get_args(literal)]
    if isinstance(value, str) and (value in LOSSES or get_close_matches(value, names, n=1, cutoff=0.6)):
        return problem, _loss_or_nearest(value, names)
    if kind == "list_type" and isinstance(value, str):
        return problem, f"write it as a list: `[{value}]`"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return problem, f'write text, in quotes: "{show(value)}"'
    return problem, f"write {words(annotation)}"
