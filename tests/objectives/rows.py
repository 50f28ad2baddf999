"""Padded rows as flat tokens, and the reference files: what the tests against the originals share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lemma.core.types import Output
from lemma.objectives import Loss, LossInputs, Totals

FOLDER = Path(__file__).resolve().parents[1] / "reference"
Case = dict[str, Any]
RTOL, ATOL, ATOL_METRICS = 1e-6, 1e-10, 1e-7


def cases(family: str) -> list[Case]:
    return json.loads((FOLDER / f"{family}.json").read_text())["cases"]


def parameters(found: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in found]


def tensor(value: Any) -> torch.Tensor:
    return torch.tensor(_numbers(value), dtype=torch.float64)


def _numbers(value: Any) -> Any:
    return [_numbers(v) for v in value] if isinstance(value, list) else float(value)


def tensors(case: Case) -> dict[str, torch.Tensor]:
    return {name: tensor(value) for name, value in case["inputs"].items() if name != "group_ids"}


def flat(
    mask: torch.Tensor,
    numbers: torch.Tensor,
    *,
    output: Output = "logprobs",
    entropies: torch.Tensor | None = None,
    rows: slice = slice(None),
    **fields: torch.Tensor,
) -> LossInputs:
    """The unmasked tokens of padded rows (of some of them, as one pack); the counts are those of all rows."""
    kept = torch.zeros_like(mask, dtype=torch.bool)
    kept[rows] = mask[rows].bool()
    number = torch.arange(len(mask))[:, None].expand_as(mask)
    return LossInputs(
        outputs={output: numbers[kept]} | ({} if entropies is None else {"entropy": entropies[kept]}),
        sequence_N=number[kept],
        group_B=torch.arange(len(mask)),
        totals=Totals(float(mask.sum()), float(len(mask)), float(len(mask))),
        tokens={name: field[kept] for name, field in fields.items()},
    )


def measured(loss: Loss, name: str) -> torch.Tensor:
    """A metric as a mean; over nothing it is not a number."""
    value, count = (torch.as_tensor(part, dtype=torch.float64) for part in loss.metrics[name])
    return value / count


def assert_equal(case: Case, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Every number found equals the original's; scalars that are metrics get the looser floor."""
    for name, value in found.items():
        wanted = tensor(expected[name])
        mine = torch.as_tensor(value, dtype=torch.float64).detach()
        is_metric = mine.ndim == 0 and name not in ("loss", "policy_loss", "value_loss")
        torch.testing.assert_close(
            mine,
            wanted,
            rtol=case.get("tolerance", RTOL),
            atol=ATOL_METRICS if is_metric else ATOL,
            equal_nan=True,
            msg=lambda text, name=name: f"{case['id']}: {name}: {text}",
        )
