"""Reinforcement learning on 1, 2 and 4 ranks: the same samples, rewards, metrics and weights, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lemma.reports.run_reader import RunReader
from tests.cluster.crew import Crew
from tests.cluster.test_run_ranks import outcome, trained

PARITY = f"{Path(__file__).parents[1] / 'algorithms' / 'toy.py'}:parity"
MODEL = {
    "tiny": {"hidden": 32, "layers": 1, "feed_forward": 32, "heads": 4, "kv_heads": 4, "context": 32},
    "override": {"tie_word_embeddings": False},
}
STAGE: dict[str, Any] = {
    "kind": "rl",
    "rewards": [PARITY],
    "rollout": {"max_tokens": 4},
    "batch": {"problems": 6, "token_budget": 96},
    "optim": {"lr": 5e-3},
    "steps": 2,
    "checkpoint": {"every": 1},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "group_size": 4, "epochs": 2, "mini_batches": 2}},
    "dapo": {"algorithm": {"name": "dapo", "group_size": 2}},  # groups of two are often dead and replaced
    "ppo": {"algorithm": {"name": "ppo"}},
    "luffy": {"algorithm": {"name": "luffy", "group_size": 4}},
}


def recipe_of(folder: Path, run: str, stage: dict[str, Any], slots: int = 4) -> dict[str, Any]:
    rows = folder / "questions.jsonl"
    if not rows.exists():
        with open(rows, "w", encoding="utf-8") as file:
            for n in range(16):
                row = {"id": str(n), "problem": f"eva has {n} pens ?", "answer": str(n % 4), "target": str(n % 4)}
                file.write(json.dumps({"dataset": "toy", **row}) + "\n")
    return {
        "run": {"dir": str(folder / run), "seed": 1, "threads": 1, "device": "cpu", "tensorboard": False},
        "model": MODEL,
        "format": "question_only",
        "cluster": {"slots": slots, "shard": "optimiser"},
        "stages": {"stage": STAGE | {"data": {"source": str(rows)}} | stage},
    }


def samples(run: Path) -> list[tuple[str, int, bytes, bytes]]:
    """Every sample of every journal: its key, number, ids and log-probabilities."""
    from lemma.rollouts.journal_reader import read_episodes

    paths = sorted((run / "stages/stage/journal").iterdir())
    found = [one for path in paths for one in read_episodes(path)]
    return sorted((repr(e.key), e.sample, e.ids.tobytes(), e.turns[0].logprobs.tobytes()) for e in found)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm(crew: Crew, tmp_path: Path, name: str) -> None:
    stage = ALGORITHMS[name]
    if name == "grpo":
        stage = stage | {"validation": {"share": 0.25, "every": 2}}
    counts = (1, 2, 4) if name == "dapo" else (1, 4)
    for count in counts:
        crew.run(count, trained, recipe_of(tmp_path, f"run-{count}", stage), slots=1)
    alone = outcome(tmp_path / "run-1")
    assert alone[0][-1]["step"] == 2
    if name == "dapo":
        assert any(row.get("rounds", 0) > 1 for row in alone[0]), "dynamic sampling never drew again"
    for count in counts[1:]:
        assert outcome(tmp_path / f"run-{count}") == alone, count
        journals = sorted(path.name for path in (tmp_path / f"run-{count}/stages/stage/journal").iterdir())
        assert len(journals) == 8 and journals[0] == "step-000001.slot-000.jsonl.gz"
        assert samples(tmp_path / f"run-{count}") == samples(tmp_path / "run-1")


def test_a_run_goes_on_with_another_number_of_ranks_and_its_samples(crew: Crew, tmp_path: Path) -> None:
    """Journals of four ranks are read by one: nothing is sampled twice."""
    stage = ALGORITHMS["grpo"] | {"steps": 3}
    crew.run(1, trained, recipe_of(tmp_path, "whole", stage), slots=1)
    crew.run(4, trained, recipe_of(tmp_path, "run", stage), slots=1)
    run = tmp_path / "run"
    shutil.rmtree(run / "stages/stage/final")
    (run / "stages/stage/done.json").unlink()
    for step in (2, 3):
        shutil.rmtree(run / f"stages/stage/checkpoints/step-{step:08d}", ignore_errors=True)
    before = {path.name: path.stat().st_mtime_ns for path in (run / "stages/stage/journal").iterdir()}
    crew.run(1, trained, recipe_of(tmp_path, "run", stage), slots=1)
    assert outcome(run) == outcome(tmp_path / "whole")
    assert {path.name: path.stat().st_mtime_ns for path in (run / "stages/stage/journal").iterdir()} == before
    reader = RunReader(run)
    assert [len(reader.read(place)["samples"]) for place in reader.chunks()] == [24, 24, 24]
