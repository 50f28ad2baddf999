"""Kill a reinforcement run with SIGKILL in every phase of a step, start the same command each time, and end with the
very tokens, rewards, metrics and weights of a run that was never killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lemma.core.files import read_json_lines
from lemma.core.random import stream
from tests.algorithms import toy
from tests.runs.test_kill import Chain

STEPS = 6
# Each death in one start, in this order: while samples come in, before the journal is closed, before and between
# updates, while a checkpoint is written and after it is there, in the middle of a line, and before the final model.
FAULTS = (
    "rollouts.sampled:5",
    "rollouts.before_finish:2",
    "rl.before_update:2",
    "rl.mid_update:3",
    "checkpoint.mid_write:1",
    "checkpoint.after_rename:1",
    "rollouts.generated:1",
    "jsonl.mid_line:8",
    "stage.before_final_rename:1",
)
EVALUATIONS = ("evaluation.before_results:1", "evaluation.before_cleanup:3")

# One algorithm dies everywhere; of the others, one with a critic and one with a controller share the phases.
DEATHS = {
    "grpo": (*FAULTS[:4], *EVALUATIONS, *FAULTS[4:]),
    "dapo": FAULTS[1::2],
    "ppo": FAULTS[0::2],
    "luffy": FAULTS[1::2],
}

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "epochs": 2, "mini_batches": 2, "group_size": 4, "kl": 0.01}},
    "dapo": {"algorithm": {"name": "dapo", "group_size": 2, "mini_batches": 2}, "replace_dead": 2},
    "ppo": {
        "algorithm": {"name": "ppo", "group_size": 2, "epochs": 2, "adaptive_kl": {"target": 0.1, "horizon": 8}},
        "optim": {"lr": 1e-2, "schedule": "cosine"},
    },
    "luffy": {
        "algorithm": {
            "name": "luffy",
            "group_size": 4,
            "mini_batches": 2,
            "prefix": {"samples": 3, "min": 0.2, "max": 1.0, "strategy": "fixed"},
            "compat": {"adaptive_entropy": {"target": 2.0}},
        },
        "rewards": ["accuracy", {"name": "format", "weight": 0.1}, toy.PARITY],
    },
}


def recipe(folder: Path, name: str, evaluated: bool, steps: int = STEPS) -> Path:
    stage = {
        "kind": "rl",
        "steps": steps,
        "data": {"source": str(toy.write_rows(folder / "questions.jsonl"))},
        "rewards": [toy.PARITY],
        "rollout": {"max_tokens": 8},
        "batch": {"problems": 4, "token_budget": 64},
        "optim": {"lr": 5e-3},
        "checkpoint": {"every": 2, "keep": 2},
    }
    if evaluated:
        stage["eval"] = {"benchmarks": [stage["data"]["source"]], "limit": 2, "max_tokens": 4, "every": 2}
    content = {
        "run": {"dir": str(folder / "run"), "seed": 5, "threads": 1, "device": "cpu", "tensorboard": False},
        "model": {"tiny": {"hidden": 16, "layers": 1, "feed_forward": 16, "heads": 2, "kv_heads": 1, "context": 64}},
        "format": {"name": "r1_zero", "preamble": False},
        "stages": {"rl": stage | SETTINGS[name]},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def make_chain(folder: Path, name: str, evaluated: bool, steps: int = STEPS) -> Chain:
    folder.mkdir()
    return Chain(recipe(folder, name, evaluated, steps), folder / "run" / "metrics.jsonl")


def outcome(chain: Chain) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, bytes]]:
    """Every metric and every sample but for timings, and every byte of the final model and of what it was made from."""
    rows = [json.loads(line) for line in chain.metrics.read_text().splitlines()]
    for row in rows:
        row.pop("timings")
    stage = chain.metrics.parent / "stages" / "rl"
    samples, ends = {}, {}
    for path in sorted((stage / "journal").iterdir()):
        lines = list(read_json_lines(path))
        end = lines.pop()
        assert end["end"], f"{path.name} is not complete"
        # Its digest is that of the file, with the timings.
        ends[path.name] = json.dumps(end | {"sha256": None}).encode()
        in_order = sorted(lines, key=lambda line: repr((line["key"], line["sample"])))
        samples[path.name] = [
            line | {"timings": None, "turns": [turn | {"timings": None} for turn in line["turns"]]} for line in in_order
        ]
    weights = [*(stage / "final").rglob("*.safetensors"), *(stage / "checkpoints").rglob("*.safetensors")]
    notes = sorted((stage / "notes").iterdir())
    assert len(notes) == len(samples)
    states = [path for path in (stage / "checkpoints").rglob("*.json") if path.name == "state.json"]
    files = {str(path.relative_to(stage)): path.read_bytes() for path in [*weights, *notes]} | ends
    for path in states:  # the recipe names the folder of its data
        state = {key: value for key, value in json.loads(path.read_text()).items() if key != "recipe"}
        files[str(path.relative_to(stage))] = json.dumps(state).encode()
    return rows, samples, files


@pytest.mark.parametrize("name", SETTINGS)
def test_a_death_in_any_phase_changes_nothing(name: str, tmp_path: Path) -> None:
    evaluated = name == "grpo"
    undisturbed = make_chain(tmp_path / "undisturbed", name, evaluated)
    whole = undisturbed.start()
    assert whole.wait(500) == 0

    chain = make_chain(tmp_path / "killed", name, evaluated)
    for fault in DEATHS[name]:
        assert chain.die_at(fault), f"the run did not get to {fault}"
    last = chain.start()
    assert last.wait(500) == 0

    rows, samples = assert_same(chain, undisturbed)
    assert len([row for row in rows if row["axis"] == "train"]) == STEPS
    assert_is_what_it_says(name, rows, samples)


@pytest.mark.kill
@pytest.mark.parametrize("name", SETTINGS)
def test_deaths_at_any_instant_change_nothing(name: str, tmp_path: Path) -> None:
    undisturbed = make_chain(tmp_path / "undisturbed", name, True, 60)
    whole = undisturbed.start()
    assert whole.wait(500) == 0
    chain = make_chain(tmp_path / "killed", name, True, 60)
    chance = stream(2, "kills", name)
    for _ in range(12):
        assert chain.kill_after(int(chance.integers(1, 4)), float(chance.random()) * 0.3)
    last = chain.start()
    assert last.wait(500) == 0
    assert_same(chain, undisturbed)


def assert_same(chain: Chain, undisturbed: Chain) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The same metrics, samples, weights and states, to the last bit; the first two."""
    (rows, samples, files), (true_rows, true_samples, true_files) = outcome(chain), outcome(undisturbed)
    assert samples.keys() == true_samples.keys()
    for step, true in true_samples.items():
        assert samples[step] == true, step
    assert rows == true_rows
    assert files.keys() == true_files.keys() and any("checkpoints" in name for name in files)
    for path, content in true_files.items():
        assert files[path] == content, f"{path} differs"
    return rows, samples


def assert_is_what_it_says(name: str, rows: list[dict[str, Any]], samples: dict[str, Any]) -> None:
    """That the run had what the setting is here for."""
    train = [row for row in rows if row["axis"] == "train"]
    if name == "grpo":
        assert max(row["updates"] for row in train) == 4 and len(rows) > len(train)
    if name == "dapo":
        assert max(row["rounds"] for row in train) > 1
    if name == "ppo":
        assert len({row["kl_weight"] for row in train}) == STEPS and all("critic/loss" in row for row in train)
    if name == "luffy":
        turns = [turn for lines in samples.values() for line in lines for turn in line["turns"]]
        given = {(turn["given"] > 0) + (turn["given"] > 0 and turn["finish"] == "given") for turn in turns}
        assert given == {0, 1, 2}, "own samples, samples that a teacher began, and whole traces"
        assert len({row["entropy_weight"] for row in train}) == STEPS
