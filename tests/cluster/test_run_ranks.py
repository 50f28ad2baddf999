"""Whole runs of small recipes on 1, 2 and 4 ranks: the same rows of metrics and the same weights, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lemma.core.events import Event, Said
from lemma.core.ranks import is_leader
from tests.cluster.crew import Crew

TINY = {"tiny": {"hidden": 32, "layers": 2, "feed_forward": 48, "context": 96}}
SFT: dict[str, Any] = {
    "kind": "supervised",
    "steps": 4,
    "data": {"arithmetic": {"count": 60, "operations": 2}},
    "batch": {"sequences": 6, "token_budget": 128},
    "optim": {"lr": 2e-3, "warmup": 2},
    "validation": {"share": 0.2, "every": 2},
    "checkpoint": {"every": 2, "keep": 2},
}
PREFERENCE: dict[str, Any] = {
    "kind": "preference",
    "steps": 3,
    "batch": {"examples": 8, "token_budget": 256},
    "optim": {"lr": 3e-3},
    "validation": {"share": 0.25},
    "checkpoint": {"every": 2},
}


def recipe_of(folder: Path, run: str, stage: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder / run), "seed": 3, "threads": 1, "device": "cpu", "tensorboard": False},
        "model": TINY,
        "format": {"name": "r1_zero", "preamble": False},
        "cluster": cluster,
        "stages": {"stage": stage},
    }


def trained(content: dict[str, Any], **options: Any) -> list[str]:
    """Run a recipe on this rank; the warnings that the first rank gave."""
    from lemma.config.load import load_values
    from lemma.recipe import Recipe
    from lemma.runs.run import train

    events: list[Event] = []
    assert train(load_values(Recipe, content, []), sink=events.append, **options) == 0
    return [event.text for event in events if isinstance(event, Said) and event.level == "warning" and is_leader()]


def outcome(run: Path) -> tuple[list[dict[str, Any]], bytes]:
    """The rows of metrics without timings, and the bytes of the final weights."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if key != "timings"} for row in rows]
    return kept, (run / "stages" / "stage" / "final" / "model.safetensors").read_bytes()


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for n in range(40):
            prompt = f"eva has {3 + n % 12} pens . buys {2 + n // 12} . how many ?"
            file.write(json.dumps({"prompt": prompt, "chosen": "many coins", "rejected": "many cards"}) + "\n")
    return path


def check_everywhere(crew: Crew, folder: Path, stage: dict[str, Any], **cluster: Any) -> None:
    """One rank with four slots, and two and four ranks with the same."""
    for count in (1, 2, 4):
        content = recipe_of(folder, f"run-{count}", stage, {"slots": 4, **cluster})
        crew.run(count, trained, content, slots=1)
    alone = outcome(folder / "run-1")
    assert alone[0][-1]["step"] == stage["steps"]
    for count in (2, 4):
        assert outcome(folder / f"run-{count}") == alone, count


def test_supervised(crew: Crew, tmp_path: Path) -> None:
    check_everywhere(crew, tmp_path, SFT, shard="optimiser")


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_preference(crew: Crew, tmp_path: Path, pairs: Path, algorithm: str) -> None:
    data = {"source": str(pairs), "cache": str(tmp_path / "cache")}
    check_everywhere(crew, tmp_path, PREFERENCE | {"algorithm": algorithm, "data": data})


def test_a_run_goes_on_with_another_number_of_ranks(crew: Crew, tmp_path: Path) -> None:
    """4 to 1, 2 to 4 and 1 to 2, each with its own way of sharing."""
    whole = SFT | {"steps": 6}
    crew.run(1, trained, recipe_of(tmp_path, "whole", whole, {"slots": 4}), slots=1)
    for before, after, shard in ((4, 1, "optimiser"), (2, 4, "gradients"), (1, 2, "none")):
        first = recipe_of(tmp_path, "part", SFT, {"slots": 4, "shard": "optimiser" if shard != "none" else "none"})
        crew.run(before, trained, first, slots=1)
        saved = tmp_path / "part/stages/stage/checkpoints/step-00000004"
        assert len(list(saved.glob("tensors*"))) == before
        second = recipe_of(tmp_path, "part", whole, {"slots": 4, "shard": "optimiser" if shard != "none" else "none"})
        crew.run(after, trained, second, slots=1)
        assert outcome(tmp_path / "part")[1] == outcome(tmp_path / "whole")[1], (before, after)
        shutil.rmtree(tmp_path / "part")


def test_slots_are_recorded(crew: Crew, tmp_path: Path) -> None:
    """By default as many as there were ranks; other ones are refused, and ranks beyond them are told."""
    crew.run(2, trained, recipe_of(tmp_path, "run", SFT | {"steps": 2}, {}))
    assert json.loads((tmp_path / "run/run.json").read_text())["slots"] == 2
    told = crew.run(4, trained, recipe_of(tmp_path, "run", SFT | {"steps": 3}, {}))
    assert sum("2 of 4 ranks have nothing to do" in text for text in told[0]) == 1
    with pytest.raises(AssertionError, match=r"cluster\.slots is 3, and this run began with 2"):
        crew.run(1, trained, recipe_of(tmp_path, "run", SFT | {"steps": 3}, {"slots": 3}))
