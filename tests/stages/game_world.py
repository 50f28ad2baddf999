"""Small games of higher_lower through real stages: what the tests of episodes share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lemma.recipe import Recipe
from lemma.rollouts import Episode, read_episodes
from lemma.rollouts.journal_reader import list_journals
from lemma.runs.run import train

TINY = {"hidden": 32, "layers": 2, "feed_forward": 64, "heads": 2, "kv_heads": 2, "context": 64}
WORDS = ["higher", "lower", "right"]
GAME = {"name": "higher_lower", "turns": 3}


def game_stage(**changes: Any) -> dict[str, Any]:
    """Four games over eight numbers a step, four players each, one token a guess."""
    return {
        "kind": "rl", "algorithm": {"name": "grpo", "group_size": 4}, "environment": GAME, "rollout": {"max_tokens": 1},
        "data": {"source": "higher_lower", "guessing": {"numbers": 8, "count": 8}}, "batch": {"problems": 4},
        "steps": 1, "optim": {"lr": 1e-3},
    } | changes  # fmt: skip


def game_recipe(folder: Path, fmt: str | dict[str, Any] = "question_only", **stages: dict[str, Any]) -> Recipe:
    usual = {"eval": {"benchmarks": []}, "checkpoint": {"every": 0}}
    return Recipe.model_validate({
        "run": {"dir": str(folder / "run"), "threads": 1, "tensorboard": False, "device": "cpu"},
        "model": {"tiny": TINY | {"words": WORDS}}, "format": fmt,
        "stages": {name: usual | stage for name, stage in stages.items()},
    })  # fmt: skip


def run_games(folder: Path, fmt: str | dict[str, Any] = "question_only", **stages: dict[str, Any]) -> Path:
    assert train(game_recipe(folder, fmt, **stages), sink=lambda event: None) == 0
    return folder / "run"


def measured(run: Path, stage: str) -> list[dict[str, Any]]:
    """The rows of a stage's training metrics."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] == stage and row["axis"] == "train"]


def episodes_of(run: Path, stage: str) -> list[Episode]:
    journals = list_journals((run / "stages" / stage / "journal").glob("*"))
    return [episode for path in journals for episode in read_episodes(path)]


def bisection(low: int, high: int, secret: int, turns: int) -> list[dict[str, str]]:
    """A conversation of somebody who knows how to win."""
    messages = [{"role": "user", "content": "?"}]
    for turn in range(1, turns + 1):
        guess = (low + high) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or turn == turns:
            break
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return messages


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path
