"""Recipes that are small on disk and large in memory, or slow to read, are refused at once, in one sentence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lemma.config.document import read
from lemma.core.errors import UserError


def laughs(levels: int, width: int) -> str:
    """Each level holds the one above it many times over."""
    lines = ["a0: &a0 [1, 2, 3]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


def merges(levels: int, width: int) -> str:
    lines = ["b0: &b0 {" + ", ".join(f"k{i}: {i}" for i in range(width)) + "}"]
    for level in range(1, levels):
        lines.append(f"b{level}: &b{level} {{<<: [{', '.join([f'*b{level - 1}'] * width)}]}}")
    return "\n".join(lines)


BOMBS = {
    "aliases of aliases": (laughs(12, 10), "more than 20,000 values"),
    "merges of merges": (merges(12, 10), "more than 20,000 values"),
    "many keys": ("\n".join(f"k{i}: {i}" for i in range(21_000)), "more than 20,000 values"),
    "many brackets": ("a: " + "[" * 5_000 + "]" * 5_000, "nested more than 64 deep"),
    "some brackets": ("a: " + "[" * 80 + "]" * 80, "nested more than 64 deep"),
    "a large file": ("# " + "x" * (1 << 20), "at most 1,048,576 bytes"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_at_once(name: str, tmp_path: Path) -> None:
    text, sentence = BOMBS[name]
    (tmp_path / "recipe.yaml").write_text(text)
    begin = time.process_time()
    with pytest.raises(UserError, match=sentence):
        read(tmp_path / "recipe.yaml")
    assert time.process_time() - begin < 20, "seconds of this process"


def test_large_recipes_of_honest_people_are_read(tmp_path: Path) -> None:
    words = ", ".join(f"word{i}" for i in range(15_000))
    (tmp_path / "recipe.yaml").write_text(f"model: {{tiny: {{words: [{words}]}}}}\n")
    assert len(read(tmp_path / "recipe.yaml").data["model"]["tiny"]["words"]) == 15_000
