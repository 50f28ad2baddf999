"""Every option with its meaning and default, from the classes that declare them: for `--help` and `docs/`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticUndefined

from lemma.config.document import write
from lemma.config.options import Options, meaning_of
from lemma.config.shape import Choice, annotation_of, choice_of, classes_below, words


@dataclass(frozen=True, slots=True)
class Entry:
    """One option. `default` is how a recipe would spell it, or None where a value must be given."""

    name: str
    kind: str
    default: str | None
    meaning: str


@dataclass(slots=True)
class Section:
    """The options at one path; `tag` is the name of the class where several are possible."""

    path: str
    tag: str | None
    meaning: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.path if self.tag is None else f"{self.path} ({self.tag})"


def sections(root: type[Options]) -> Iterator[Section]:
    """All sections of a class of options, parents before children; what was described once is referred to."""
    return _sections(root, "", None, {})


def _sections(options: type[Options], path: str, tag: str | None, seen: dict[type[Options], str]) -> Iterator[Section]:
    section = Section(path, tag, _one_line(options.__doc__))
    seen[options] = section.title
    below: list[tuple[type[Options], str, str | None]] = []
    for name, info in options.model_fields.items():
        annotation = annotation_of(info)
        meaning = meaning_of(options, name)
        for steps, inner in classes_below(annotation):
            if inner in seen:
                meaning = f"{meaning} Same keys as {seen[inner]}."
            else:
                where = ".".join(filter(None, (path, name, *steps)))
                below.append((inner, where, _tag(annotation, inner)))
        default = _spelt(info.get_default(call_default_factory=True), choice_of(annotation))
        section.entries.append(Entry(info.alias or name, words(annotation), default, meaning))
    yield section
    for inner, where, inner_tag in below:
        if inner not in seen:
            yield from _sections(inner, where, inner_tag, seen)


def _tag(annotation: Any, options: type[Options]) -> str | None:
    """The name under which a registry knows a class, however deep in the annotation it stands."""
    choice = choice_of(annotation)
    if choice is not None:
        return next(f"{choice.by}: {tag}" for tag, known in choice.everything().items() if known is options)
    inner = (_tag(part, options) for part in getattr(annotation, "__args__", ()))
    return next((tag for tag in inner if tag is not None), None)


def _spelt(value: Any, choice: Choice | None) -> str | None:
    if value is PydanticUndefined:
        return None
    if isinstance(value, Options):
        return "" if choice is None else str(getattr(value, choice.by))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and value and all(isinstance(part, Options) for part in value):
        return f"[{', '.join(getattr(part, 'name', '') for part in value)}]"
    return write(list(value) if isinstance(value, tuple) else value, flow=True).strip()


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def as_help(root: type[Options], width: int = 100) -> str:
    """The options as text for a terminal."""
    lines = ["what a recipe can say, as `key [default]` and meaning:"]
    for section in sections(root):
        heading = f"{section.title or 'the recipe'}: {section.meaning}"
        lines += ["", *textwrap.wrap(heading, width, subsequent_indent="  ")]
        for entry in section.entries:
            lines += _help_lines(entry, width)
    return "\n".join(lines) + "\n"


def _help_lines(entry: Entry, width: int, margin: int = 30) -> list[str]:
    head = f"  {entry.name} [{entry.default}]" if entry.default else f"  {entry.name}"
    kind = "" if entry.kind.startswith("a mapping") else f" ({entry.kind})"
    body = textwrap.wrap(entry.meaning + kind, width - margin, break_on_hyphens=False)
    if len(head) < margin:
        first, *body = body
        return [head.ljust(margin) + first, *(" " * margin + line for line in body)]
    return [head, *(" " * margin + line for line in body)]


def as_markdown(root: type[Options]) -> str:
    """The options as tables for the reference page."""
    lines: list[str] = []
    for section in sections(root):
        lines += ["", f"## `{section.title or 'recipe'}`", "", section.meaning, ""]
        lines += ["| key | what to write | default | meaning |", "|---|---|---|---|"]
        for entry in section.entries:
            default = f"`{entry.default}`" if entry.default else ""
            cells = (f"`{entry.name}`", entry.kind, default, entry.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
