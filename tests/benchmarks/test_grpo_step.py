"""The benchmark of a GRPO step runs the stage itself, and its parts add up."""

from __future__ import annotations

import pytest

from benchmarks.grpo_step import OPTIONS, PARTS, run_lemma, table
from lemma.stages.reinforcement import rl_loop


@pytest.mark.slow
def test_a_small_row_runs_and_says_what_metrics_and_diagnosis_cost() -> None:
    loop = dict(vars(rl_loop))
    small = {"who": "lemma", "shape": "tiny", "problems": 2, "samples": 4, "prompt": 8, "new": 8, "steps": 2}
    found = run_lemma(OPTIONS | small | {"device": "cpu"})
    parts = [found[f"{name}_seconds"] for name in PARTS]
    assert all(part >= 0 for part in parts) and sum(parts) <= found["seconds"]
    assert found["metrics_seconds"] > 0 and found["diagnosis_seconds"] > 0
    assert found["mismatch_mean"] < 1e-5
    assert "metrics and diagnosis:" in table([found, {**small, "error": "out of memory"}])
    assert dict(vars(rl_loop)) == loop, "nothing of the stage stays replaced"
