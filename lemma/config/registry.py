"""Components by name: Lemma's own, those of a Python file as `path.py:Name`, and those that other packages install.

A package offers its components as entry points, such as

    [project.entry-points."lemma.rewards"]
    brevity = "my_package.rewards:Brevity"
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from lemma.config.options import Options
from lemma.core.errors import Interruption, UserError, nearest
from lemma.core.outside import OutsideCode, no_early_end

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_PLACE = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)", re.DOTALL)
Kind = TypeVar("Kind")
Made = TypeVar("Made", bound=Options)


class Registry(dict[str, Kind], Generic[Kind]):
    """A dictionary of Lemma's own components. `find` also looks outside, for subclasses or instances of `base`.

    `what` is the plural by which entry points know them: `lemma.rewards`. Each of `plugins` imports one of
    `lemma/plugins`, when somebody names it.
    """

    def __init__(
        self, what: str, base: type, own: Mapping[str, Kind], plugins: Mapping[str, Callable[[], Kind]] | None = None
    ):
        super().__init__(own)
        self.what, self.base, self.plugins = what, base, dict(plugins or {})

    def everything(self) -> dict[str, Kind]:
        """All that comes with Lemma."""
        return {**self, **{name: load() for name, load in self.plugins.items()}}

    def with_lemma(self, name: str) -> Kind | None:
        """The component of this name that comes with Lemma."""
        return self.plugins[name]() if name in self.plugins else self.get(name)

    def find(self, name: str) -> Kind | None:
        """The component of this name; None if there is none. One that exists but is broken is a `UserError`."""
        if name in self or name in self.plugins:
            return self.with_lemma(name)
        if is_place(name):
            entry = load_place(name)
            self._check(entry, name, file_of(name))
        elif name in installed(self.what):
            entry = _load_installed(installed(self.what)[name])
            self._check(entry, name, None)
        else:
            return None
        return entry

    def names(self) -> list[str]:
        """Every name without a path, sorted."""
        return sorted({*self, *self.plugins, *installed(self.what)})

    def _check(self, entry: Any, name: str, file: Path | None) -> None:
        is_class = isinstance(entry, type)
        if not (issubclass(entry, self.base) if is_class else isinstance(entry, self.base)):
            raise UserError(f"'{name}' is not {_article(self.base.__name__)}", file=file, fix=self._derive())
        fields = entry.model_fields if isinstance(entry, type) and issubclass(entry, Options) else {}
        if file is not None and "name" in fields and fields["name"].annotation is not str:
            raise UserError(
                f"'{name}' has a field `name` that allows one name only", file=file,
                fix="remove the field: a recipe names the class by its place",
            )  # fmt: skip

    def _derive(self) -> str:
        return f"derive it from `{self.base.__module__}.{self.base.__name__}`"


def from_options(kind: type[Made], options: Mapping[str, Any], what: str) -> Made:
    """A component of this class with these options; `what` names it in the sentence about one that does not fit."""
    try:
        return kind(**options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise UserError(f"{what} has no option '{place}'", fix=nearest(place, kind.model_fields)) from None
        fault = str(first["msg"]).removeprefix("Value error, ")
        raise UserError(f"option '{place}' of {what}: {fault}" if place else f"{what}: {fault}") from None


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOU" else f"a {noun}"


def is_place(text: str) -> bool:
    """Whether a name says where something is: `path.py:Name`."""
    return _PLACE.fullmatch(text) is not None


def file_of(place: str) -> Path:
    found = _PLACE.fullmatch(place)
    assert found is not None, "the caller knows that this is a place"
    return Path(found["file"]).expanduser()


def beside(value: Any, folder: Path) -> Any:
    """What a file in this folder says, each `path.py:Name` of a file that lies there with its whole path. Others are
    meant from the current folder."""
    if isinstance(value, dict):
        return {name: beside(inner, folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [beside(inner, folder) for inner in value]
    if not isinstance(value, str) or not is_place(value) or file_of(value).is_absolute():
        return value
    file = folder.resolve() / file_of(value)
    return f"{file}:{value.rpartition(':')[2]}" if file.is_file() and folder.resolve() != Path.cwd() else value


def without_folders(value: Any) -> Any:
    """The same, each `path.py:Name` without the folders before it: they depend on where a command is given."""
    if isinstance(value, dict):
        return {name: without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_folders(inner) for inner in value]
    if not isinstance(value, str) or not is_place(value):
        return value
    return f"{file_of(value).name}:{value.rpartition(':')[2]}"


_HANDED: dict[str, Any] = {}


def hand_over(part: Any) -> str:
    """The place of a function or class that a program hands over itself. Its file is not imported again by whoever
    asks for it in this process."""
    name, module = getattr(part, "__qualname__", ""), sys.modules.get(getattr(part, "__module__", None) or "")
    place = f"{getattr(module, '__file__', None)}:{name}"
    if not is_place(place):
        last = name.rpartition(".")[2]
        raise UserError(
            f"{name or repr(part)} is not at the top of a Python file, where a resumed run would find it again",
            fix=f"write it into a file, and name it `my_parts.py:{last if last.isidentifier() else 'NAME'}`",
        )
    _HANDED[place] = part
    load_place.cache_clear()
    return place


@cache
def load_place(place: str) -> Any:
    """What a Python file calls by this name. A file is imported once, until `forget_files`."""
    if place in _HANDED:
        return _HANDED[place]
    file, name = file_of(place), place.rpartition(":")[2]
    if not file.is_file():
        raise UserError(f"there is no file '{file}'", fix="correct the path of the Python file")
    module = _module(file.resolve())
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"there is no '{name}'", file=file, fix=nearest(name, names))
    return getattr(module, name)


_imports = 0
"""Files whose import has begun and not ended."""


@contextmanager
def _importing() -> Iterator[None]:
    global _imports
    _imports += 1
    try:
        yield
    finally:
        _imports -= 1


def check_not_imported(call: str) -> None:
    """Refuse a call at the top of a script that a process of a run imports, to find a part that stands in it."""
    if _imports:
        raise UserError(
            f"it calls {call} on import, and a worker process imports it to load your function",
            fix='write `if __name__ == "__main__":` above what the script does',
        )


@cache
def _module(file: Path) -> ModuleType:
    name = f"lemma_outside_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing(), OutsideCode(), no_early_end():
            spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"this is not Python: {error.msg}", file=file, line=error.lineno) from error
    except (KeyboardInterrupt, Interruption):
        raise
    except BaseException as error:
        inside = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename) == file]
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(
            f"this file cannot be imported: {kind}{error}",
            file=file,
            line=inside[-1] if inside else None,
        ) from error
    return module


def forget_files() -> None:
    """Import files again when they are next named: in a notebook they may have changed since the last run."""
    _HANDED.clear()
    load_place.cache_clear()
    _module.cache_clear()


@cache
def installed(what: str) -> dict[str, EntryPoint]:
    """What other packages offer as `lemma.<what>`, by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=f"lemma.{what}")}


def _load_installed(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        package = "another package" if point.dist is None else f"the package {point.dist.name}"
        raise UserError(
            f"'{point.name}' of {package} cannot be imported: {type(error).__name__}: {error}",
            fix=f"repair {point.value}, or uninstall the package",
        ) from error


def outside_files(*values: Any) -> list[Path]:
    """The files of all components from outside of Lemma that some options use, in order and each once."""
    return list(dict.fromkeys(file for value in values for file in _files(value)))


def _files(value: Any) -> Iterator[Path]:
    if isinstance(value, str):
        if is_place(value) and file_of(value).is_file():
            yield file_of(value)
    elif isinstance(value, Options):
        module = sys.modules.get(type(value).__module__)
        file = getattr(module, "__file__", None)
        if file is not None and not type(value).__module__.startswith("lemma."):
            name = getattr(value, "name", "")
            yield file_of(name) if is_place(name) else Path(file)
        for field in type(value).model_fields:
            yield from _files(getattr(value, field))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _files(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _files(inner)
