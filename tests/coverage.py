"""Which statements and branches of lemma/ the tests run: a plugin, and `python -m tests.coverage` for the report.

A tracer makes all Python code of a process take twice as long (before Python 3.12), torch's and transformers' too. Here
every statement of lemma/ notes itself that it runs, and nothing else is slower: as a module is imported, marks are put
between its statements, `__ran__[7] = 1`. What other processes run is not seen.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PREFIX = ".coverage."
RAN = "__ran__"

# What each mark of a file stands for: True for a branch, False for a statement. A mark's number is its place.
Marks = list[bool]
# For each file that was imported, by its path under the root: 1 where a mark was passed.
passed: dict[str, list[int]] = {}


class Marker:
    """Puts marks into the statements of one file."""

    def __init__(self) -> None:
        self.marks: Marks = []

    def mark(self, at: ast.stmt | ast.ExceptHandler, is_branch: bool = False) -> ast.stmt:
        self.marks.append(is_branch)
        where = {"lineno": at.lineno, "col_offset": 0, "end_lineno": at.lineno, "end_col_offset": 0}
        ran, place = ast.Name(RAN, ast.Load(), **where), ast.Constant(len(self.marks) - 1, **where)
        target = ast.Subscript(ran, place, ast.Store(), **where)
        return ast.Assign([target], ast.Constant(1, **where), **where)

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        return [part for statement in statements for part in self._marked(statement)]

    def _marked(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        if _is_left_out(statement):
            yield statement
            return
        yield self.mark(statement)
        if isinstance(statement, ast.If | ast.For | ast.AsyncFor | ast.While):
            self._fork(statement)
        elif isinstance(statement, ast.Match):
            for case in statement.cases:
                case.body = [self.mark(case.body[0], is_branch=True), *self.block(case.body)]
        else:
            self._inner(statement)
        yield statement

    def _fork(self, statement: ast.If | ast.For | ast.AsyncFor | ast.While) -> None:
        """Into the body, or past it: `else` of a loop is where it ends by itself."""
        is_endless = isinstance(statement, ast.While) and isinstance(statement.test, ast.Constant)
        statement.body = [self.mark(statement, is_branch=True), *self.block(statement.body)]
        if not is_endless:
            statement.orelse = [self.mark(statement, is_branch=True), *self.block(statement.orelse)]

    def _inner(self, statement: ast.stmt) -> None:
        for handler in getattr(statement, "handlers", []):
            handler.body = [self.mark(handler), *self.block(handler.body)]
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, None)
            if inner:
                first = _first(inner)
                setattr(statement, name, inner[:first] + self.block(inner[first:]))


def _is_left_out(statement: ast.stmt) -> bool:
    """Texts and dots, what only type checkers read, and what cannot happen."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Raise(exc=ast.Name(id=name) | ast.Call(func=ast.Name(id=name))):
            return name == "AssertionError"
    return False


def _first(body: Sequence[ast.stmt]) -> int:
    """The place of the first statement that something may stand before."""
    for place, statement in enumerate(body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            return place
    return len(body)


def marked(path: Path) -> tuple[ast.Module, Marks]:
    tree, marker = ast.parse(path.read_bytes(), filename=str(path)), Marker()
    first = _first(tree.body)
    tree.body[first:] = marker.block(tree.body[first:])
    return tree, marker.marks


class MarkingLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree, marks = marked(Path(self.path))
        passed.setdefault(self._name(), [0] * len(marks))
        return compile(tree, self.path, "exec", dont_inherit=True)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        code = self.get_code(module.__name__)
        setattr(module, RAN, passed[self._name()])
        exec(code, module.__dict__)

    def _name(self) -> str:
        return str(Path(self.path).relative_to(ROOT))


class MarkingFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "lemma":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader) and Path(spec.loader.path).is_relative_to(ROOT / "lemma"):
            spec.loader = MarkingLoader(name, spec.loader.path)
        return spec


def pytest_addoption() -> None:
    """The earliest hook, before any conftest.py."""
    early = [name for name in sys.modules if name.partition(".")[0] == "lemma"]
    assert not early, f"imported before they could be marked: {early}"
    sys.meta_path.insert(0, MarkingFinder())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if passed:
        Path(session.config.rootpath, f"{PREFIX}{os.getpid()}").write_text(json.dumps(passed), encoding="utf-8")


# --- the report ----------------------------------------------------------------------------------------------------


def counts(marks: Marks, ran: Sequence[int]) -> dict[str, int]:
    """Statements and branches of a file, and those that nothing ran."""
    statements = [one for one, is_branch in zip(ran, marks, strict=True) if not is_branch]
    branches = [one for one, is_branch in zip(ran, marks, strict=True) if is_branch]
    return {
        "statements": len(statements), "missed": statements.count(0), "branches": len(branches),
        "not taken": branches.count(0),
    }  # fmt: skip


def line(name: str, numbers: dict[str, int], width: int) -> str:
    whole = numbers["statements"] + numbers["branches"]
    share = 1 - (numbers["missed"] + numbers["not taken"]) / whole if whole else 1.0
    return f"{name:{width}}" + "".join(f"{number:12}" for number in numbers.values()) + f"{100 * share:10.1f}%"


def report(root: Path) -> Iterator[str]:
    """A line for each file that was not run whole, and one for all."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(root.glob(f"{PREFIX}*"))]
    rows: dict[str, dict[str, int]] = {}
    for path in sorted((root / "lemma").rglob("*.py")):
        name, (_, marks) = str(path.relative_to(root)), marked(path)
        runs = [one[name] for one in found if name in one and len(one[name]) == len(marks)]
        rows[name] = counts(marks, [max(ran) for ran in zip(*runs, strict=True)] if runs else [0] * len(marks))
    total = {key: sum(row[key] for row in rows.values()) for key in ("statements", "missed", "branches", "not taken")}
    width = max(map(len, rows))
    yield f"{'':{width}}" + "".join(f"{key:>12}" for key in total) + f"{'covered':>11}"
    yield from (line(name, row, width) for name, row in rows.items() if row["missed"] or row["not taken"])
    yield line("all files", total, width)


if __name__ == "__main__":
    print("\n".join(report(ROOT)))
