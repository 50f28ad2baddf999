"""Small supervised recipes in a folder of their own, for the tests of stages and of the run around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lemma.core.events import Event, Said
from lemma.recipe import Recipe, load_recipe
from lemma.runs.run import train

STAGE: dict[str, Any] = {
    "kind": "supervised",
    "steps": 6,
    "data": {"arithmetic": {"count": 60, "operations": 2}},
    "batch": {"sequences": 6, "token_budget": 128},
    "optim": {"lr": 2e-3, "warmup": 2},
    "validation": {"share": 0.2, "every": 2},
    "checkpoint": {"every": 3, "keep": 2},
}


class World:
    """Recipes in a folder of their own, and what their runs said."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run = folder / "run"
        self.events: list[Event] = []

    def recipe(
        self, changes: dict[str, Any] | None = None, stages: dict[str, Any] | None = None, **model: Any
    ) -> Recipe:
        """One stage `sft` with `changes`, or the given stages."""
        wanted = stages or {"sft": changes or {}}
        content = {
            "run": {"dir": str(self.run), "seed": 3, "threads": 1, "device": "cpu", "tensorboard": False},
            "model": {"tiny": {"hidden": 32, "layers": 2, "feed_forward": 48, "context": 96}, **model},
            "format": {"name": "r1_zero", "preamble": False},
            "stages": {name: STAGE | stage for name, stage in wanted.items()},
        }
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return load_recipe(path)

    def train(self, recipe: Recipe, **options: Any) -> int:
        self.events = []
        return train(recipe, sink=self.events.append, **options)

    def said(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Said)]

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def numbers(self) -> list[dict[str, Any]]:
        """The rows without timings, which alone may differ between two runs."""
        return [{key: value for key, value in row.items() if key != "timings"} for row in self.rows()]

    def final(self, stage: str = "sft") -> Path:
        return self.run / "stages" / stage / "final"

    def weights(self, stage: str = "sft") -> bytes:
        return (self.final(stage) / "model.safetensors").read_bytes()
