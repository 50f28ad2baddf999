"""YAML in which every value remembers the line it stands on. A value means what a reader expects of it: `5e-6` is a
number, `on` and `no` are words unless true or false is wanted there, a date is text, and `None` is null."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lemma.core.errors import UserError, nearest_file

Step = str | int
KeyPath = tuple[Step, ...]

_TAG = "tag:yaml.org,2002:"
_SCALARS = [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9](?:_?[0-9])*|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9](?:_?[0-9])*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
]


ENDINGS = (".yaml", ".yml", ".json")
"""JSON is YAML as well, but for a few things (see `_json_as_yaml`)."""
# A string, and the ':' after it where it is a key.
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?([ \r\n]*:)?', re.DOTALL)
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")
_LONGEST_KEY = 1000  # a little below YAML's own limit
_ESCAPE = re.compile(r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|.)", re.IGNORECASE | re.DOTALL)

# A recipe is written by hand. Beyond these limits it is a mistake, or an attempt to fill the memory through aliases.
MOST_BYTES = 1 << 20
MOST_VALUES = 20_000
DEEPEST = 64
TOO_DEEP, FLATTER = f"values are nested more than {DEEPEST} deep", "write them flatter"


class _Loader(yaml.SafeLoader):
    """Knows the scalars above and no others."""


class _Dumper(yaml.SafeDumper):
    """Quotes whatever this module or any other reader of YAML would take for something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), list(_first))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written: a line of a file, or a `--set` on the command line."""

    file: str
    line: int | None = None
    order: int = 0

    def sort_key(self) -> tuple[int, int]:
        return (self.order, self.line or 0)


@dataclass(slots=True)
class Document:
    """Plain data, and the place of each value in it."""

    file: str
    data: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """Where the value at this path stands, or the nearest thing around it that was written down."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return Place(self.file, 1)

    def below(self, path: KeyPath) -> Iterator[KeyPath]:
        return (other for other in self.places if other[: len(path)] == path)


def read(path: str | Path, what: str = "recipe") -> Document:
    """Read a YAML file whose top level is a mapping; anything else is a `UserError`."""
    text = _read_text(Path(path), what)
    loader = _Builder(str(path))
    data = loader.build(text)
    if data is None:
        fix = "`lemma train --help` lists what can be written in it" if what == "recipe" else "write `key: value` lines"
        raise UserError(f"the {what} is empty", file=path, fix=fix)
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else "a single value"
        fix = "write for example `run:`" if what == "recipe" else "write for example `source: problems.jsonl`"
        raise UserError(f"the {what} is {kind}, not `key: value` lines", file=path, line=1, fix=fix)
    return Document(str(path), data, loader.places)


def _read_text(path: Path, what: str) -> str:
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a {what}", fix="name a .yaml file in it")
    if not path.exists():
        raise UserError(f"there is no {what} {path}", fix=_neighbour(path))
    if path.suffix.lower() not in ENDINGS:
        raise UserError(
            f"a {what} is a YAML or JSON file, and {path} is not", fix="name a file that ends in .yaml, .yml or .json"
        )
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise UserError(f"a {what} has at most {MOST_BYTES:,} bytes, and {path} has more", fix="check the path")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return _json_as_yaml(text) if path.suffix.lower() == ".json" else text
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError("this line is not UTF-8 text", file=path, line=line, fix="save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read the {what}: {error.strerror}", file=path, fix="check its permissions") from None


def _json_as_yaml(text: str) -> str:
    """The same values on the same lines, without tabs, which JSON has between values only."""
    return _JSON_STRING.sub(_string_as_yaml, text.replace("\t", " "))


def _string_as_yaml(found: re.Match[str]) -> str:
    """YAML has one escape for a character beyond 16 bits, allows fewer characters unescaped and takes some of them for
    the end of a line. A key that is long, or has its ':' on another line, needs a '?' before it."""

    def joined(pair: re.Match[str]) -> str:
        if pair[1] is None:
            return pair[0]
        return f"\\U{0x10000 + ((int(pair[1], 16) - 0xD800) << 10) + int(pair[2], 16) - 0xDC00:08X}"

    text = _NOT_IN_YAML.sub(lambda one: f"\\u{ord(one[0]):04X}", _ESCAPE.sub(joined, found[0]))
    needs_mark = found[1] is not None and (found[1].lstrip(" ") != ":" or len(text) > _LONGEST_KEY)
    return f"? {text}" if needs_mark else text


def _neighbour(path: Path) -> str:
    """What the user may have meant by a path that does not exist."""
    for suffix in ENDINGS:
        if path.with_name(path.name + suffix).exists():
            return f"did you mean {path.with_name(path.name + suffix)}?"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either"
    names = [other.name for other in path.parent.iterdir() if other.suffix in ENDINGS]
    close = nearest_file(path.name, names)
    return f"did you mean {path.parent / close}?" if close else "check the path"


def parse_value(text: str) -> Any:
    """A value as written after `=` on the command line. Text that YAML would trip over is taken as it is."""
    if not text.strip():
        return text
    structured = text.lstrip()[0] in "[{\"'"
    try:
        value = _Builder("value").build(text)
    except UserError as error:
        if structured:
            raise UserError(error.problem) from None
        return text
    starts_comment = value is None and text.strip() not in ("~", "null", "Null", "NULL", "None")
    return text if starts_comment or (isinstance(value, dict | list) and not structured) else value


def write(data: Any, flow: bool = False) -> str:
    """YAML that `read` gives back unchanged: in blocks, or in one line of brackets."""
    width = 10**6 if flow else 120
    text = yaml.dump(data, Dumper=_Dumper, default_flow_style=flow, width=width, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n")


class _Builder:
    """Plain data from YAML nodes, with the place of each value."""

    def __init__(self, file: str):
        self.file = file
        self.places: dict[KeyPath, Place] = {}
        self._open: list[yaml.Node] = []
        self._count = 0

    def build(self, text: str) -> Any:
        try:
            node = yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            raise _broken(self.file, text, error) from None
        except RecursionError:
            raise UserError(TOO_DEEP, file=self.file, fix=FLATTER) from None
        except yaml.reader.ReaderError as error:
            line = text[: error.position].count("\n") + 1
            raise UserError(
                "this line holds a control character",
                file=self.file,
                line=line,
                fix="delete it and type the line again",
            ) from None
        return None if node is None else self._value(node, ())

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        if any(node is other for other in self._open):
            raise self._error(node, "this value contains itself", "write it out without the *alias")
        self._count += 1
        if len(self._open) > DEEPEST:
            raise self._error(node, TOO_DEEP, FLATTER)
        if self._count > MOST_VALUES:
            raise self._error(node, f"there are more than {MOST_VALUES:,} values, aliases counted as often as they are "
                              "used", "write fewer")  # fmt: skip
        self.places.setdefault(path, Place(self.file, node.start_mark.line + 1))
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._value(child, (*path, index)) for index, child in enumerate(node.value)]
            assert isinstance(node, yaml.ScalarNode)
            return self._scalar(node)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in sorted(node.value, key=lambda pair: pair[0].tag != _TAG + "merge"):
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key is a single word here", "write `key: value`, and quote { } and [ ]")
            if key_node.tag == _TAG + "merge":
                merged |= self._merged(value_node, path)
                continue
            key = key_node.value
            if key in lines:
                where = ".".join(map(str, (*path, key)))
                raise self._error(
                    key_node, f"'{where}' is written twice, first on line {lines[key]}", "keep one of the two"
                )
            lines[key] = key_node.start_mark.line + 1
            if key in merged:
                for old in [p for p in self.places if p[: len(path) + 1] == (*path, key)]:
                    del self.places[old]
            self.places[(*path, key)] = Place(self.file, lines[key])
            result[key] = self._value(value_node, (*path, key))
        return merged | result

    def _merged(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        """What `<<: *name` brings in: keys written out next to it win."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Any] = {}
        for part in reversed(nodes):
            value = self._value(part, path)
            if not isinstance(value, dict):
                raise self._error(node, "`<<` takes a mapping", "write `<<: *name` where `&name` marks a mapping")
            result |= value
        return result

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind == "str" or kind == "merge":
            return text
        if kind == "null":
            return None
        try:
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, 16) if text[:2] == "0x" else int(text)
            if kind == "float":
                return float(text.replace(".inf", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):
            raise self._error(node, f"'{text}' is not a value of type {kind}", "write it without the !! tag") from None
        raise self._error(node, f"the tag {node.tag} means nothing here", "write the value without a ! tag")

    def _error(self, node: yaml.Node, problem: str, fix: str) -> UserError:
        return UserError(problem, file=self.file, line=node.start_mark.line + 1, fix=fix)


_REPAIRS = [
    (r"'\\t'", False, "there is a tab here", "indent with spaces"),
    (
        r"could not find expected ':'",
        True,
        "this line is neither `key: value` nor a list item",
        "put ': ' after the key",
    ),
    (
        r"mapping values are not allowed",
        False,
        "a ':' is not expected here",
        "put a value that holds ': ' in quotes, or repair the indentation",
    ),
    (r"expected <block end>", False, "this line is not indented like the ones around it", "align it with them"),
    (r"expected ',' or '\]'", True, "the list that opens here is not closed", "add the missing ']' or ','"),
    (r"expected ',' or '\}'", True, "the mapping that opens here is not closed", "add the missing '}' or ','"),
    (r"unexpected end of stream", True, "the text that opens here has no closing quote", "close it"),
    (r"but found another document", False, "a second document starts here", "delete the line `---`"),
    (r"expected alphabetic or numeric", False, "text cannot start with & or *", "put it in quotes"),
    (r"found undefined alias", False, "this *alias has no &anchor above it", "put it in quotes if it is meant as text"),
    (
        r"found character '.' that cannot start any token",
        False,
        "text cannot start with this character",
        "put it in quotes",
    ),
]


def _broken(file: str, text: str, error: yaml.MarkedYAMLError) -> UserError:
    """What is wrong with text that is not YAML, at the line and column where a person would look."""
    problem, fix = str(error.problem), "check the indentation and the quotes around it"
    mark = error.problem_mark or error.context_mark
    for pattern, at_start, meaning, repair in _REPAIRS:
        if re.search(pattern, problem):
            problem, fix = meaning, repair
            mark = (error.context_mark if at_start else error.problem_mark) or mark
            break
    assert mark is not None, "a marked error has a mark"
    line, column, problem, fix = _look_above(text.splitlines(), mark.line, mark.column, problem, fix)
    return UserError(f"not valid YAML at column {column + 1}: {problem}", file=file, line=line + 1, fix=fix)


def _look_above(lines: list[str], line: int, column: int, problem: str, fix: str) -> tuple[int, int, str, str]:
    """YAML often trips one line below the mistake: a key without its ':' or its space, or one that is not aligned."""
    above = re.match(r"(?P<indent> *)[A-Za-z_][\w-]*(?P<colon>:?)(?P<space> *)(?P<value>[^\s/#])?", lines[line - 1])
    if not line or not above or not problem.startswith("a ':'"):
        return line, column, problem, fix
    if not above["colon"] and not above["value"]:
        return line - 1, above.end(), "no ':' follows this key", "put one there"
    if above["colon"] and above["value"] and not above["space"]:
        return line - 1, above.end() - 1, "no space follows the ':'", "put one there"
    if above["colon"] and above["value"] and lines[line].startswith(above["indent"] + " "):
        deeper = "this line is indented deeper than the one above, which has a value already"
        return line, len(lines[line]) - len(lines[line].lstrip()), deeper, "align the two"
    return line, column, problem, fix


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
