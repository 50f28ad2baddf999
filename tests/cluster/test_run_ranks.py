"""Whole runs of small recipes on 1, 2 and 4 ranks: the same rows of metrics and the same weights, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.core.events import Event, Said
from lemma.core.ranks import is_leader, rank, together
from lemma.runs.stopping import StopNow, StopSignal
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


def outcome(run: Path, kind: str = "") -> tuple[list[dict[str, Any]], bytes]:
    """The rows of metrics without timings, and the bytes of the final weights."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if key != "timings"} for row in rows]
    return kept, (run / "stages" / "stage" / "final" / kind / "model.safetensors").read_bytes()


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


def test_dropout_belongs_to_the_pack(crew: Crew, tmp_path: Path) -> None:
    """Whichever rank computes a pack draws the same noise for it."""
    outcomes = []
    for count in (1, 4):
        content = recipe_of(tmp_path, f"run-{count}", SFT | {"steps": 2}, {"slots": 4})
        crew.run(count, trained, content | {"model": TINY | {"lora": {"r": 4, "dropout": 0.3}}}, slots=1)
        outcomes.append(outcome(tmp_path / f"run-{count}", "merged"))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_preference(crew: Crew, tmp_path: Path, pairs: Path, algorithm: str) -> None:
    data = {"source": str(pairs), "cache": str(tmp_path / "cache")}
    check_everywhere(crew, tmp_path, PREFERENCE | {"algorithm": algorithm, "data": data})


def test_a_run_goes_on_with_another_number_of_ranks(crew: Crew, tmp_path: Path) -> None:
    """4 to 1, 2 to 4 and 1 to 2, each with its own way of sharing."""
    whole = SFT | {"steps": 6}
    for before, after, shard in ((4, 1, "optimiser"), (2, 4, "gradients"), (1, 2, "none")):
        cluster = {"slots": 4, "shard": shard}
        crew.run(1, trained, recipe_of(tmp_path, "whole", whole, cluster), slots=1)
        crew.run(before, trained, recipe_of(tmp_path, "part", SFT, cluster), slots=1)
        saved = tmp_path / "part/stages/stage/checkpoints/step-00000004"
        assert len(list(saved.glob("tensors*"))) == before
        crew.run(after, trained, recipe_of(tmp_path, "part", whole, cluster), slots=1)
        layout = json.loads((tmp_path / "part/stages/stage/layout.json").read_text())
        expected = {"ranks": after, "slots": 4, "shard": shard, "token_budget": 128, "recomputed": 0}
        assert layout == expected | {"precision": "float32"}
        assert outcome(tmp_path / "part")[1] == outcome(tmp_path / "whole")[1], (before, after)
        shutil.rmtree(tmp_path / "part")
        shutil.rmtree(tmp_path / "whole")


def test_slots_are_recorded(crew: Crew, tmp_path: Path) -> None:
    """By default as many as there were ranks; other ones are refused, and ranks beyond them are told."""
    crew.run(2, trained, recipe_of(tmp_path, "run", SFT | {"steps": 2}, {}))
    assert json.loads((tmp_path / "run/run.json").read_text())["slots"] == 2
    told = crew.run(4, trained, recipe_of(tmp_path, "run", SFT | {"steps": 3}, {}))
    assert sum("2 of 4 ranks have nothing to do" in text for text in told[0]) == 1
    with pytest.raises(AssertionError, match=r"cluster\.slots is 3, and this run began with 2"):
        crew.run(1, trained, recipe_of(tmp_path, "run", SFT | {"steps": 3}, {"slots": 3}))


def stopped(inside: bool) -> tuple[bool, bool]:
    """SIGTERM reaches the second rank in its own part of an evaluation, or between the parts. Whether the evaluation
    was broken off here, and whether all agree on a stop afterwards."""
    stop = StopSignal()
    with stop.listening():

        def ask() -> None:
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        try:
            with stop.at_once():
                if not inside:
                    ask()
                together(ask if inside else lambda: None)
                together(lambda: None)
        except StopNow:
            return True, stop.is_agreed()
        return False, stop.is_agreed()


def test_a_stop_breaks_an_evaluation_off_on_all_ranks_or_on_none(crew: Crew) -> None:
    assert crew.run(2, stopped, True) == [(True, True)] * 2
    assert crew.run(2, stopped, False) == [(False, True)] * 2


def troubled(kind: str) -> str:
    """What each rank raises where the second one fails in its own part."""

    class Local(Exception):
        """Nobody else can read this one."""

    def own_part() -> None:
        if rank() == 1:
            raise UserError("the disk is full", fix="make room") if kind == "user" else Local("inside")

    try:
        together(own_part)
    except Exception as error:  # noqa: BLE001 (what it is, is what is asked)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_one_rank_raises_all_raise(crew: Crew) -> None:
    assert crew.run(4, troubled, "user") == ["UserError: the disk is full; make room"] * 4
    first, second, *others = crew.run(4, troubled, "own")
    assert second == "Local: inside" and {first, *others} == {"RuntimeError: rank 1: Local: inside"}


def unlike(kind: str, folder: Path) -> str:
    """What is said where the second rank has other weights or data, another precision, or a folder of its own."""
    import torch

    from lemma.core.roll_call import check_alike, roll_call
    from lemma.models.same_weights import check_same_weights

    numbers = {what: rank() if what == kind else 0 for what in ("weights", "precision", "data", "folder")}
    module = torch.nn.Linear(2, 2, bias=False, dtype=(torch.float32, torch.bfloat16)[numbers["precision"]])
    torch.nn.init.constant_(module.weight, float(numbers["weights"]))
    own = folder / f"machine-{numbers['folder']}" / "run"
    try:
        check_same_weights(module)
        check_alike({"the data": str(numbers["data"])}, "stage sft")
        roll_call(own, "run.dir")
    except UserError as error:
        return str(error).replace(str(own), "RUN")
    return "nothing"


def test_what_differs_between_machines_is_refused(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(2, unlike, "nothing", tmp_path) == ["nothing"] * 2
    assert [path.name for path in tmp_path.rglob("*")] == ["machine-0", "run"], "no file is left"
    there = sorted(tmp_path.rglob("*"))
    kinds = ("weights", "precision", "data", "folder")
    (weights,), (precision,), (data,), folder = (set(crew.run(2, unlike, kind, tmp_path)) for kind in kinds)
    assert weights.startswith("rank 1 on ") and "finds other content for the weights of the model than" in weights
    assert "computes on cpu in bfloat16, and rank 0 on " in precision and "on cpu in float32; name a dev" in precision
    assert "stage sft: rank 1 on " in data and "finds other content for the data than rank 0 on " in data
    assert any("does not see what rank 1 on " in text and "writes to RUN; set run.dir to" in text for text in folder)
    assert sorted(tmp_path.rglob("*")) == there, "the second machine keeps no empty folder"
