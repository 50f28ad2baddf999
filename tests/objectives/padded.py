"""Stored cases of the originals: padded rows become flat tokens, flat gradients become padded rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lemma.objectives import LossInputs, Totals

FOLDER = Path(__file__).resolve().parents[1] / "reference"
Case = dict[str, Any]


def cases(family: str) -> list[Case]:
    """Every case of a family, with references to shared tensors filled in."""
    content = json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))
    for case in content["cases"]:
        for key, value in case["inputs"].items():
            if isinstance(value, dict) and "$ref" in value:
                case["inputs"][key] = content["tensors"][value["$ref"].removeprefix("tensors/")]
    found: list[Case] = content["cases"]
    return found


def tensor(value: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(_numbers(value), dtype=dtype)


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    return float("nan") if value is None else float(value)


def flat(
    log_probs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    tokens: Mapping[str, torch.Tensor] | None = None,
    rows: Mapping[str, torch.Tensor] | None = None,
    entropy_BT: torch.Tensor | None = None,
    totals: Totals | None = None,
) -> LossInputs:
    """Rows as the terms of an objective. `tokens` are rectangles (B, T), `rows` numbers that every token of a row has.

    Without `totals`, this is the whole step.
    """
    kept = mask_BT.bool()
    number_BT = torch.arange(len(mask_BT))[:, None].expand_as(mask_BT)
    given = {name: value[kept] for name, value in (tokens or {}).items()}
    given |= {name: value.reshape(-1, 1).expand_as(mask_BT)[kept] for name, value in (rows or {}).items()}
    return LossInputs(
        outputs={"logprobs": log_probs_BT[kept]} | ({} if entropy_BT is None else {"entropy": entropy_BT[kept]}),
        sequence_N=number_BT[kept],
        group_B=torch.arange(len(mask_BT)),
        totals=totals or Totals(float(kept.sum()), float(len(mask_BT)), float(len(mask_BT))),
        tokens=given,
    )


def assert_equal(mine: torch.Tensor, expected: Any, case: Case, atol: float = 1e-10) -> None:
    """Within the tolerance of the case, see the README of the shared reference vectors."""
    want = expected if isinstance(expected, torch.Tensor) else tensor(expected, mine.dtype)
    tolerance = case.get("tolerance", 1e-6)
    torch.testing.assert_close(mine.detach(), want, rtol=tolerance, atol=atol, equal_nan=True)
