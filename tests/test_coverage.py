"""The marks of the coverage: a file does what it did before, and what was not run is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.coverage import RAN, counts, marked, report

SOURCE = '''"""A text that stays first."""
from __future__ import annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nowhere import Nothing


class Shape:
    """Kept."""

    side: int = 2
    """What a side is."""


def said(things: list[int], limit: int) -> list[str]:
    """Kept too."""
    found = []
    for thing in things:
        if thing > limit:
            break
        elif thing == 0:
            found.append("none")
    else:
        found.append("all")
    while True:
        try:
            found.append(str(1 // things[0]))
        except ZeroDivisionError:
            found.append("zero")
        break
    match limit:
        case 1:
            found.append("one")
        case _:
            found.append("many")
    if limit < 0:
        raise AssertionError("cannot be")
    return found
'''


def run(path: Path, *calls: tuple[list[int], int]) -> tuple[dict[str, Any], dict[str, int]]:
    tree, marks = marked(path)
    space: dict[str, Any] = {RAN: [0] * len(marks)}
    exec(compile(tree, str(path), "exec", dont_inherit=True), space)
    space["found"] = [space["said"](*call) for call in calls]
    return space, counts(marks, space[RAN])


def test_marks_change_nothing_and_count_what_did_not_run(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    space, nothing = run(path)
    assert space["__doc__"] == "A text that stays first." and space["said"].__doc__ == "Kept too."
    assert space["Shape"].__doc__ == "Kept." and space["said"].__annotations__["return"] == "list[str]"
    assert space["said"].__code__.co_firstlineno == 16
    # Statements: an import, a class with a side, a function with 18; the handler of an exception counts as one.
    assert nothing == {"statements": 22, "missed": 18, "branches": 11, "not taken": 11}

    space, some = run(path, ([1, 2], 2))
    assert space["found"] == [["all", "1", "many"]]
    # Not run: the break, what a zero gets, the handler with what it does, and the first case.
    assert some == {"statements": 22, "missed": 5, "branches": 11, "not taken": 4}

    space, most = run(path, ([1, 2], 2), ([0, 2], 1))
    assert space["found"] == [["all", "1", "many"], ["none", "zero", "one"]]
    assert most == {"statements": 22, "missed": 0, "branches": 11, "not taken": 1}


def test_what_several_processes_ran_is_put_together(tmp_path: Path) -> None:
    folder = tmp_path / "lemma"
    folder.mkdir()
    (folder / "module.py").write_text(SOURCE)
    (folder / "alone.py").write_text("x = 1\nif x:\n    y = 2\n")
    (folder / "whole.py").write_text("x = 1\n")
    for number, call in enumerate([([1, 2], 2), ([0, 2], 1)]):
        space, _ = run(folder / "module.py", call)
        (tmp_path / f".coverage.{number}").write_text(
            json.dumps({"lemma/module.py": space[RAN], "lemma/whole.py": [1]})
        )
    lines = [line.split() for line in report(tmp_path)]
    assert lines == [
        ["statements", "missed", "branches", "not", "taken", "covered"],
        ["lemma/alone.py", "3", "3", "2", "2", "0.0%"],
        ["lemma/module.py", "22", "0", "11", "1", "97.0%"],
        ["all", "files", "26", "3", "13", "3", "84.6%"],
    ]
