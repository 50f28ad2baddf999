"""Both walks through the code are taken: what the page names is called."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import lemma

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \d+ \| `([^`]+)` \| (.+?) \|", re.MULTILINE)


def names_in(path: Path) -> set[str]:
    """The functions, classes and methods of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def hops(page: str) -> list[tuple[str, str]]:
    """Pairs of file and function."""
    return [(file, name) for file, cell in ROW.findall(page) for name in re.findall(r"`([^`]+)`", cell)]


@contextmanager
def watched(called: set[tuple[str, str]]) -> Iterator[None]:
    """Within `with`, every function of Lemma that is called, in any thread."""
    before, home = sys.getprofile(), f"{ROOT / 'lemma'}/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            called.add((frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


RECIPE = {
    "run": {"dir": "run", "device": "cpu", "threads": 1, "tensorboard": False},
    "model": {"tiny": {"hidden": 32, "layers": 1, "feed_forward": 32, "heads": 4, "kv_heads": 4, "context": 128}},
    "format": {"name": "r1_zero", "preamble": False},
    "stages": {
        "grpo": {
            "steps": 1,
            "algorithm": {"group_size": 4, "clip": 0.2},
            "rewards": ["own.py:parity"],
            "data": {"arithmetic": {"count": 10}},
            "rollout": {"max_tokens": 6},
            "batch": {"problems": 2},
        }
    },
}


@pytest.mark.slow(15)
def test_every_hop_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def parity(item):\n    return float(sum(item.ids) % 2)\n")
    step, evaluation = PAGE.split("## One evaluation")
    for part, walk in (
        (step, lambda: lemma.train(RECIPE, console=False)),
        (evaluation, lambda: lemma.evaluate("run", "arithmetic", limit=2, max_tokens=4, device="cpu", out="out")),
    ):
        called: set[tuple[str, str]] = set()
        with watched(called):
            walk()
        whole = called | {(file, name.split(".")[0]) for file, name in called}
        assert [hop for hop in hops(part) if hop not in whole] == []


def test_every_file_named_in_the_text_exists() -> None:
    files = set(re.findall(r"`(lemma/[\w/]+\.py)`", PAGE))
    assert len(files) > 30 and all((ROOT / file).is_file() for file in files)
    for file, name in re.findall(r"`(lemma/[\w/]+\.py)` \(`([\w.]+)`\)", PAGE):
        assert name in names_in(ROOT / file), name
