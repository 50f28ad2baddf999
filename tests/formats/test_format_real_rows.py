"""Real traces and rollouts: what people and models wrote is parsed, and put into other formats without loss."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from lemma.core.types import Demonstration, Message, Problem
from lemma.formats import FORMATS, make_format
from tests.shared import shared

pytestmark = pytest.mark.realdata


def rows(*path: str) -> list[dict[str, Any]]:
    with gzip.open(shared("data", *path), "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


@pytest.mark.parametrize("name", ["math_r1zero_sft", "math_deepseek_chat"])
def test_verbatim_r1_zero_rows_keep_the_format(name: str) -> None:
    fmt = make_format("r1_zero")
    for row in rows("traces", f"{name}.jsonl.gz"):
        problem = Problem((Message("user", row["problem"]),))
        demonstration = Demonstration(problem, response=row["response"], prompt=row["prompt"])
        assert fmt.target(demonstration) == row["response"]
        assert fmt.parse(row["response"]).ok
        ending = f"\nUser: {row['problem']}\nAssistant: <think>"
        assert fmt.prompt(problem, None).endswith(ending) and row["prompt"].endswith(ending)


@pytest.mark.parametrize("name", ["math_boxed_cot", "long_traces"])
def test_traces_go_into_every_format(name: str) -> None:
    for row in rows("traces", f"{name}.jsonl.gz"):
        demonstration = Demonstration(
            Problem((Message("user", row["problem"]),)),
            reasoning=row["generated_solution"],
            answer=row["expected_answer"],
        )
        for kind in FORMATS.values():
            parsed = kind().parse(kind().target(demonstration))
            assert parsed.ok
            assert parsed.answer == row["expected_answer"].strip()


def test_boxes_of_sampled_solutions_are_found() -> None:
    """1,280 completions of a base model; 42 of them have no box at all."""
    parsed = [
        make_format("boxed").parse(text) for row in rows("rollouts", "math_x16.jsonl.gz") for text in row["responses"]
    ]
    assert sum(one.ok for one in parsed) == len(parsed) - 42 == 1238
