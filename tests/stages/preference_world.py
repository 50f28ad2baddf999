"""Small preference recipes and pairs in a folder of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lemma.core.events import Event, Progressed, Said
from lemma.recipe import load_recipe
from lemma.runs.run import train

STAGE: dict[str, Any] = {
    "kind": "preference",
    "steps": 4,
    "batch": {"examples": 8, "token_budget": 512},
    "optim": {"lr": 3e-3},
    "validation": {"share": 0.25},
}
RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "small"
ALGORITHMS = ("dpo", "kto", "cpo", "simpo", "orpo")
Row = dict[str, Any]


def toy_rows(count: int = 40) -> list[Row]:
    """The chosen response counts coins, the rejected one cards, whatever the question."""
    return [
        {
            "prompt": f"eva has {3 + n % 12} pens . buys {2 + n // 12} . how many ?",
            "chosen": "many coins",
            "rejected": "many cards",
        }
        for n in range(count)
    ]


class World:
    """Recipes and data in a folder of their own, and what their runs said."""

    def __init__(self, folder: Path, rows: list[Row] | None = None):
        self.folder, self.run = folder, folder / "run"
        self.events: list[Event] = []
        self.data = self.write("pairs.jsonl", rows or toy_rows())

    def write(self, name: str, rows: list[Row]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def recipe(self, algorithm: Any, changes: Row | None = None, run: str = "run", **model: Any) -> Any:
        self.run = self.folder / run
        stage = STAGE | {
            "algorithm": algorithm,
            "data": {"source": str(self.data), "cache": str(self.folder / "cache")},
        }
        content = {
            "run": {"dir": str(self.run), "seed": 3, "threads": 1, "device": "cpu", "tensorboard": False},
            "model": {"tiny": {"hidden": 32, "layers": 2, "feed_forward": 48, "context": 96}, **model},
            "format": {"name": "r1_zero", "preamble": False},
            "stages": {"prefer": stage | (changes or {})},
        }
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return load_recipe(path)

    def train(self, algorithm: Any, changes: Row | None = None, run: str = "run", **model: Any) -> list[Row]:
        """Rows of metrics of a whole run, without timings."""
        self.events = []
        assert train(self.recipe(algorithm, changes, run, **model), sink=self.events.append) == 0
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if key != "timings"} for row in rows]

    def said(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Said)]

    def scored(self) -> int:
        """Sequences that the reference was asked about."""
        done = [event for event in self.events if isinstance(event, Progressed) and event.what == "reference"]
        return done[-1].total if done else 0
