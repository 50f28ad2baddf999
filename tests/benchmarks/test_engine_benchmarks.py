"""The benchmarks of decoding and evaluation, on a CPU and small."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode, eval_overlap
from benchmarks.grpo_work import parameters_of
from benchmarks.sft_step import SHAPES, make_config


@pytest.mark.slow
def test_an_evaluation_beside_an_engine_that_only_waits(tmp_path: Path) -> None:
    for name in eval_overlap.FILES:
        one = {"id": name, "problem": f"{name} ?", "answer": "7", "responses": ["\\boxed{7}", "\\boxed{8}"]}
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as handle:
            handle.write(json.dumps(one) + "\n")
    row: dict[str, Any] = {"who": "paced", "rollouts": str(tmp_path), "problems": 4, "samples": 2, "new": 8}
    found = eval_overlap.run_paced(row | {"repeats": 1, "vocabulary": 2048, "slots": 4, "wave_seconds": 0.05})
    assert found["verdicts"] == {"right": 4, "wrong": 4} and found["tokens"] == 64
    assert found["engine_seconds"] >= 0.1 and found["ratio"] > 1
    assert found["seconds"] >= found["before_seconds"] + found["engine_seconds"]
    assert "| paced |" in eval_overlap.table([found])


@pytest.mark.slow
def test_decoding_says_when_the_first_token_came_and_what_the_floors_are() -> None:
    row = decode.OPTIONS | {"who": "native", "shape": "tiny", "sequences": 4, "prompt": 8, "new": 5, "device": "cpu"}
    found = decode.run_native(row)
    assert 0 < found["first_token_median"] <= found["first_token_99"] <= found["seconds"]
    weights, cached = (
        parameters_of(make_config("tiny")),
        2 * 2 * 2 * 16 * 4,
    )  # keys and values of two layers, two heads of 16 in float32
    assert found["floor_bytes_seconds"] * 4.3e12 == pytest.approx(5 * 2 * weights + 4 * (8 * 5 + 12.5) * cached)
    assert found["floor_matrix_seconds"] * 790e12 == pytest.approx(2 * weights * 4 * 13)
    assert "| native, tiny, 4 x (8 + 5) |" in decode.table([found, {**row, "error": "a | b"}])


def test_rows_of_decoding_name_a_shape_and_a_runner() -> None:
    rows = [row for own in decode.SETS.values() for row in own]
    assert all(row["shape"] in SHAPES and row["who"] in ("native", "transformers") for row in rows)
    assert {row["sequences"] for row in decode.SETS["long"]} == {64, 128}
