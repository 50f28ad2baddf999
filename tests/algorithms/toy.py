"""One task for all algorithms: a name in the question decides which of four words is right. Nothing else helps.

    eva has pens ?  ->  1          tom has pens ?  ->  2

Every word is right for a quarter of the questions, so that a policy that does not read them is right in a quarter of
the cases at most. The base model has learnt to answer with one of the words and to end, and nothing about which.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lemma.core.events import Event, Said
from lemma.data.arithmetic import NAMES, THINGS
from lemma.recipe import Recipe, load_recipe
from lemma.rewards import RewardInput
from lemma.runs.run import train

ANSWERS = ("1", "2", "3", "4")
MAX_TOKENS = 2
MODEL = {
    "tiny": {"hidden": 64, "layers": 1, "feed_forward": 64, "heads": 4, "kv_heads": 4, "context": 32},
    # Tied, the names would be pushed together as words that are never said, and could not be told apart any more.
    "override": {"tie_word_embeddings": False},
}
REWARD = f"{__file__}:said"
PARITY = f"{__file__}:parity"
NOTHING = f"{__file__}:nothing"
SLOW = f"{__file__}:slow"
QUESTIONS = {f"{name} has {thing} ?": word for name, word in zip(NAMES, ANSWERS, strict=False) for thing in THINGS[:4]}


def said(item: RewardInput) -> float:
    """1 where the right word is all that was said."""
    return float(item.completion.split() == [item.problem.gold])


def parity(item: RewardInput) -> float:
    """A reward that random tokens earn half of the time."""
    return float(sum(item.ids) % 2)


def nothing(item: RewardInput) -> None:
    """No reward at all."""


def slow(item: RewardInput) -> float:
    """Parity, after some thought."""
    time.sleep(0.01)
    return parity(item)


def write_rows(path: Path, *, demonstrations: bool = False) -> Path:
    """The questions with a teacher's trace each, or, to learn the words, each with every word as its response."""
    with open(path, "w", encoding="utf-8") as file:
        for question, gold in QUESTIONS.items():
            row = {"dataset": "toy", "problem": question, "answer": gold}
            for word in ANSWERS if demonstrations else (gold,):
                more = {"response": word} if demonstrations else {"target": word}
                file.write(json.dumps({"id": question, **row, **more}) + "\n")
    return path


class Toy:
    """Runs recipes on the task in one folder; `base` is a model that knows the words."""

    def __init__(self, folder: Path, base: Path | None = None):
        self.folder, self.base = folder, base
        self.run = folder / "run"
        self.events: list[Event] = []

    def recipe(self, stage: Mapping[str, Any], *, seed: int = 1, **model: Any) -> Recipe:
        content = {
            "run": {"dir": str(self.run), "seed": seed, "threads": 1, "device": "cpu", "tensorboard": False},
            "model": (MODEL if self.base is None else {"path": str(self.base)}) | model,
            "format": "question_only",
            "stages": {"toy": dict(stage)},
        }
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return load_recipe(path)

    def train(self, stage: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
        """Run a stage; its rows of metrics, without timings."""
        assert train(self.recipe(stage, **options), sink=self.events.append) == 0
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key != "timings"} for line in lines]

    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Said) and event.level == "warning"]

    @property
    def final(self) -> Path:
        return self.run / "stages" / "toy" / "final"


def supervised(folder: Path) -> dict[str, Any]:
    """A stage that teaches the words."""
    return {
        "kind": "supervised",
        "steps": 60,
        "data": {"source": str(write_rows(folder / "words.jsonl", demonstrations=True))},
        "batch": {"sequences": 24, "token_budget": 4096},
        "optim": {"lr": 1e-2, "schedule": "linear"},
        "checkpoint": {"every": 0},
    }


def reinforcement(folder: Path, algorithm: Mapping[str, Any] | str, **changes: Any) -> dict[str, Any]:
    """A stage that learns the task; `changes` replace what it says."""
    return {
        "kind": "rl",
        "algorithm": algorithm,
        "data": {"source": str(write_rows(folder / "questions.jsonl"))},
        "rewards": [REWARD],
        "rollout": {"max_tokens": MAX_TOKENS},
        "batch": {"problems": 8, "token_budget": 4096},
        "optim": {"lr": 5e-3},
        "steps": 30,
        "checkpoint": {"every": 0},
    } | changes


def base_model(folder: Path) -> Path:
    """A model that answers every question with each of the words equally often."""
    world = Toy(folder)
    world.train(supervised(folder))
    return world.final
