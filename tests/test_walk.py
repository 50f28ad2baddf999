"""Four walks through the code are taken: what docs/walk.md names is called, and no more is entered than before."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.walks import COUNTS, ROOT, WALKS, counted, walked

ALLOWED = json.loads(COUNTS.read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \d+ \| `([^`]+)` \| (.+?) \|", re.MULTILINE)
HEADINGS = {
    "lemma train": "One step of GRPO",
    "lemma eval": "One evaluation",
    "sft": "Supervised fine-tuning",
    "episode with a tool": "An episode with a tool",
}
# What kind of CPU this is, and which thread comes first, decides about a few functions.
SPARE_LINES, SPARE_FUNCTIONS = 200, 8
COME_TO_STAY = "say in the commit why more code is entered, and run: python -m tests.walks --update"


def hops(heading: str) -> list[tuple[str, str]]:
    """Pairs of file and function."""
    part = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [(file, name) for file, cell in ROW.findall(part) for name in re.findall(r"`([^`]+)`", cell)]


def names_in(path: Path) -> set[str]:
    """The functions, classes and methods of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("name", list(WALKS))
def test_a_walk_is_as_the_page_says_and_enters_no_more_than_before(name: str, tmp_path: Path) -> None:
    for walk, places in walked(name, tmp_path).items():
        entered = {(file, function) for file, function in places}
        if heading := HEADINGS.get(walk):
            called = {(f"lemma/{file}", function) for file, function in entered}
            called |= {(file, function.split(".")[0]) for file, function in called}
            assert [hop for hop in hops(heading) if hop not in called] == []
        counts = counted(walk, entered)
        assert counts["files"] <= ALLOWED[walk]["files"], COME_TO_STAY
        assert counts["lines"] <= ALLOWED[walk]["lines"] + SPARE_LINES, COME_TO_STAY
        assert counts["functions"] <= ALLOWED[walk]["functions"] + SPARE_FUNCTIONS, COME_TO_STAY


def test_every_file_named_in_the_text_exists() -> None:
    files = set(re.findall(r"`(lemma/[\w/]+\.py)`", PAGE))
    assert len(files) > 40 and all((ROOT / file).is_file() for file in files)
    for file, name in re.findall(r"`(lemma/[\w/]+\.py)` \(`([\w.]+)`\)", PAGE):
        assert name in names_in(ROOT / file), name
