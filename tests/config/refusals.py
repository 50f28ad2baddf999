"""A good recipe, wrong ones made of it, and the one sentence that a refused command leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from lemma.cli import main

GOOD = """\
run: {dir: out, seed: 1}
model:
  path: tiny
  lora: {r: 8}
format: r1_zero
stages:
  sft:
    steps: 10
    optim: {lr: 5e-6}
    data: {mix: [{source: a.jsonl, count: 2}]}
"""


def swap(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, f"{old!r} must stand once in the recipe"
    return GOOD.replace(old, new)


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr that a refused command leaves behind, and nothing else."""
    before = sorted(Path().rglob("*"))
    assert main(arguments) == 2
    assert sorted(Path().rglob("*")) == before
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lemma: error: ") and err.endswith("\n") and err.count("\n") == 1
    return err.removeprefix("lemma: error: ").rstrip("\n")


def complaint_about(recipe: str, capsys: pytest.CaptureFixture[str]) -> str:
    Path("recipe.yaml").write_text(recipe, encoding="utf-8")
    return complaint(["train", "recipe.yaml", "--dry-run"], capsys)
