"""The benchmark of a step runs the stage itself, its parts add up, and its sets name work that can be run."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import rows
from benchmarks.grpo_step import OPTIONS, PARTS, PPO_PARTS, SETS, run_lemma, table
from benchmarks.grpo_work import config_of, floors, memory_limited, parameters_of
from benchmarks.rows import as_typed, made_by, spread, versions
from benchmarks.sft_step import SHAPES
from lemma.stages.reinforcement import rl_loop

SMALL = {"who": "lemma", "shape": "tiny", "problems": 2, "samples": 4, "prompt": 8, "new": 8, "steps": 2}


@pytest.mark.slow
def test_a_small_row_runs_and_says_what_metrics_and_diagnosis_cost() -> None:
    loop = dict(vars(rl_loop))
    found = run_lemma(OPTIONS | SMALL | {"device": "cpu"})
    parts = [found[f"{name}_seconds"] for name in PARTS]
    assert all(part >= 0 for part in parts) and sum(parts) <= found["seconds"]
    assert found["metrics_seconds"] > 0 and found["diagnosis_seconds"] > 0
    assert found["mismatch_mean"] < 1e-5
    assert "metrics and diagnosis:" in table([found, {**SMALL, "error": "out of memory"}])
    assert dict(vars(rl_loop)) == loop, "nothing of the stage stays replaced"


@pytest.mark.slow
def test_the_parts_of_ppo_are_those_of_scoring_and_updating() -> None:
    found = run_lemma(OPTIONS | SMALL | {"device": "cpu", "algorithm": "ppo"})
    scoring, learning = PPO_PARTS[:3], PPO_PARTS[3:]
    assert all(found[f"{name}_seconds"] > 0 for name in PPO_PARTS)
    assert sum(found[f"{name}_seconds"] for name in scoring) <= found["score_seconds"]
    assert sum(found[f"{name}_seconds"] for name in learning) <= found["update_seconds"]


@pytest.mark.parametrize("name", SETS)
def test_rows_of_a_set_name_a_shape_and_whole_batches(name: str) -> None:
    for row in SETS[name]:
        whole = OPTIONS | row
        assert whole["shape"] in SHAPES and whole["who"] in ("lemma", "trl", "trl_ppo")
        if "batch" in whole:
            assert whole["problems"] * whole["samples"] % whole["batch"] == 0 and whole["batch"] % whole["samples"] == 0


def test_the_shape_of_7b_is_that_of_the_published_model() -> None:
    assert parameters_of(config_of({"shape": "7B"})) == 7_615_616_512


def test_floors_count_weights_once_a_token_and_a_critic_without_its_head() -> None:
    config = config_of({"shape": "tiny"})
    row = {"problems": 1, "samples": 2, "prompt": 0, "new": 4}
    parameters = 1000
    found = floors(row, config, parameters)
    cache = 2 * 2 * 2 * 2 * 16  # keys and values, two bytes, two layers, two heads of 16
    assert found["floor_generate_bytes_seconds"] * 4.3e12 == pytest.approx(4 * 2000 + 2 * 8 * cache)
    seen = 3 * 2 * 8 * (2 * 2 * 2 * 64)
    assert found["floor_update_seconds"] * 790e12 == pytest.approx(6 * parameters * 8 + seen)
    critic = floors(row | {"algorithm": "ppo"}, config, parameters, 4)["floor_update_seconds"]
    assert critic * 790e12 == pytest.approx(4 * (2 * (6 * parameters * 8 + seen) - 6 * 2048 * 64 * 8))


def test_a_plan_sees_the_memory_that_a_row_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    device: Any = SimpleNamespace(total_memory=160 * 2**30, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device_=None: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device_=None: (100 * 2**30, 160 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    with memory_limited(120):
        seen = torch.cuda.get_device_properties(0)
        assert (seen.total_memory, seen.name) == (120 * 2**30, "a GPU")
        assert torch.cuda.mem_get_info() == (60 * 2**30, 120 * 2**30)
    assert shares == [0.75] and torch.cuda.get_device_properties(0) is device


def test_a_table_says_who_made_it_but_not_where_it_was_written() -> None:
    command = as_typed("benchmarks.x", ["--set", "main", "--out", "/somewhere/x.jsonl", "--limit", "5"])
    assert command == "python -m benchmarks.x --set main --limit 5"
    made = {"date": "2026-01-02", "commit": "abc", "command": command}
    results = [{"made": {**made, "device": "A", "torch": "2"}}, {"made": {**made, "device": "A", "trl": "1"}}]
    assert made_by(results) == f"2026-01-02, A, commit abc; torch 2, trl 1; `{command}`"
    assert spread([1.0, 2.0, 4.0]) == 1.5


def test_a_module_of_another_package_costs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FlashAttention 4 that was not installed by pip has no version."""
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    assert {"torch", "transformers"} <= versions().keys() and "flash-attn-4" not in versions()


def test_a_package_counts_where_it_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails to import leaves its parent behind: flash_attn alone says nothing."""
    monkeypatch.setattr(rows.importlib.metadata, "version", lambda name: "4.0")
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert "flash-attn-4" not in versions()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    assert versions()["flash-attn-4"] == "4.0"
