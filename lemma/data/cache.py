"""The cache of prepared data: read rows, kept under the hash of what they were made from.

An entry is one file of JSON lines. The first line holds the digest of the rest, so that a damaged entry is detected and
rebuilt; the second holds messages to show whenever the rows are used, such as how many were left out. Nothing ever
becomes stale: if the content, the options, or the code that reads or filters rows changes, so does the name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from lemma.core import types
from lemma.core.errors import warn
from lemma.core.events import counted
from lemma.core.files import write_whole
from lemma.core.types import Demonstration, Judged, Message, Preference, Problem, content_id
from lemma.data import choices, columns, conversations, pairs, read_files, readers, rows, sources
from lemma.data.readers import Item

Built = tuple[list[Item], list[str]]
"""Items, and messages about the rows they came from."""

KINDS: dict[str, type] = {kind.__name__: kind for kind in (Problem, Demonstration, Preference, Judged)}


def cache_folder(given: str | None) -> Path:
    """The folder that the recipe names, or $LEMMA_CACHE, or `~/.cache/lemma`."""
    return Path(given or os.environ.get("LEMMA_CACHE") or "~/.cache/lemma").expanduser() / "data"


def file_digest(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@lru_cache(maxsize=2)
def _code_digest(has_numbers_read: bool) -> str:
    """Changes whenever the code that turns files into items does, that which reads the numbers in them included."""
    from lemma.data import load_rows

    modules = [types, rows, read_files, sources, columns, pairs, choices, conversations, readers, load_rows]
    if has_numbers_read:
        from lemma.plugins.vary import marks, quantities, roles, vary

        modules += [marks, quantities, roles, vary]
    return content_id([inspect.getsource(module) for module in modules])


def cached(folder: Path, key: dict[str, Any], build: Callable[[], Built]) -> Built:
    """The items under this key and their messages: from the cache if it holds an intact entry, otherwise built and
    stored.

    Freshly built items go through JSON too, so that the first run and later ones see the same items.
    """
    has_numbers_read = bool(key.get("variations")) or key.get("marks") == "drop"
    path = folder / f"{content_id(_code_digest(has_numbers_read), key)}.jsonl"
    body = _load(path)
    if body is None:
        items, notes = build()
        lines = [notes, *map(_encode, items)]
        body = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines).encode()
        _store(path, key, body)
    first, *others = body.splitlines()
    counting = counted(others, "reading prepared rows", len(others))
    return [_decode(json.loads(line)) for line in counting], json.loads(first)


def _store(path: Path, key: dict[str, Any], body: bytes) -> None:
    """Store an entry; a full or read-only disk only costs time on the next run."""
    head = json.dumps({"key": key, "digest": hashlib.sha256(body).hexdigest()}) + "\n"
    try:
        write_whole(path, head.encode() + body)
    except OSError as error:
        warn(f"prepared data could not be kept in {path.parent}: {error.strerror}")


def _load(path: Path) -> bytes | None:
    """The rows of an entry; None if it is absent or damaged."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        whole = json.loads(head)["digest"] == hashlib.sha256(body).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return body if whole else None


def _encode(item: Item) -> dict[str, Any]:
    return {"kind": type(item).__name__, **_fields(item)}


def _fields(item: Any) -> dict[str, Any]:
    """The fields of an item and of what it contains; `dataclasses.asdict` makes deep copies and takes four times as
    long."""
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    if "messages" in values:
        values["messages"] = [_fields(message) for message in item.messages]
    if "problem" in values:
        values["problem"] = _fields(item.problem)
    return values


def _decode(values: dict[str, Any]) -> Item:
    kind = KINDS[values.pop("kind")]
    if kind is Problem:
        return _problem(values)
    return kind(**{**values, "problem": _problem(values["problem"])})


def _problem(values: dict[str, Any]) -> Problem:
    said = tuple(Message(**message) for message in values["messages"])
    lists = {name: tuple(values[name]) for name in ("golds", "choices", "traces")}
    return Problem(**{**values, **lists, "messages": said})
