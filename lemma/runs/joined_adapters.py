"""Joins the adapters of several stages into one, for the model that the first of them started from.

A later stage trains its adapter on the merged model of the previous one, so its adapter alone does not fit the original
model. The sum of the updates does: B1 A1 s1 + B2 A2 s2 + ..., whose rank is at most the sum of the ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lemma.core.errors import UserError
from lemma.core.files import use_umask

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


class Factors(NamedTuple):
    """A low-rank matrix `up @ down`: (out, rank) and (rank, in)."""

    up: torch.Tensor
    down: torch.Tensor

    def norm(self) -> float:
        """Frobenius norm, without forming the large matrix."""
        return math.sqrt(max(0.0, float(torch.trace((self.up.T @ self.up) @ (self.down @ self.down.T)))))


class Joined(NamedTuple):
    rank: int
    error: float
    """Norm of the truncation error, relative to the norm of all updates."""


def join_adapters(folders: Sequence[Path], target: Path, rank: int | None) -> Joined:
    """Replace the adapter in `target` with the sum of those in `folders`, at this rank; default: the sum of the
    ranks."""
    from safetensors.torch import save_file

    parts = [_read(folder) for folder in folders]
    names = sorted(set().union(*parts))
    whole = {name: joined([part[name] for part in parts if name in part]) for name in names}
    most = max(factors.down.shape[0] for factors in whole.values())
    rank = most if rank is None else min(rank, most)
    tensors: dict[str, torch.Tensor] = {}
    lost = total = 0.0
    for name, factors in whole.items():
        dtype = _dtype(folders[-1])
        kept = Factors(*(part.to(dtype) for part in truncated(factors, rank)))
        lost += difference(factors, Factors(kept.up.double(), kept.down.double())).norm() ** 2
        total += factors.norm() ** 2
        tensors[name + UP], tensors[name + DOWN] = kept.up.contiguous(), kept.down.contiguous()
    settings = json.loads((target / SETTINGS).read_text())
    settings |= {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    save_file(tensors, str(target / WEIGHTS), metadata={"format": "pt"})
    use_umask(target, WEIGHTS)
    (target / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return Joined(rank, math.sqrt(lost / total) if total else 0.0)


def joined(parts: Sequence[Factors]) -> Factors:
    """The sum of low-rank matrices as one."""
    return Factors(torch.cat([part.up for part in parts], dim=1), torch.cat([part.down for part in parts], dim=0))


def difference(one: Factors, other: Factors) -> Factors:
    return joined([one, Factors(-other.up, other.down)])


def truncated(factors: Factors, rank: int) -> Factors:
    """The nearest matrix of at most this rank, by a singular value decomposition of the small core; padded with zeros
    to exactly that many columns."""
    left, core_left = torch.linalg.qr(factors.up)
    right, core_right = torch.linalg.qr(factors.down.T)
    u, sizes, v = torch.linalg.svd(core_left @ core_right.T)
    keep = min(rank, len(sizes))
    root = sizes[:keep].sqrt()
    up, down = (left @ u[:, :keep]) * root, (root[:, None] * v[:keep]) @ right.T
    missing = rank - keep
    return Factors(
        torch.cat([up, up.new_zeros(up.shape[0], missing)], dim=1),
        torch.cat([down, down.new_zeros(missing, down.shape[1])], dim=0),
    )


def _read(folder: Path) -> dict[str, Factors]:
    """The updates of one adapter by layer, in double precision, its scale included."""
    from safetensors.torch import load_file

    try:
        settings: Mapping[str, Any] = json.loads((folder / SETTINGS).read_text())
        tensors = load_file(str(folder / WEIGHTS))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the adapter of an earlier stage is missing or broken ({error})", file=folder, fix="train that stage again"
        ) from error
    if settings.get("use_dora"):
        raise UserError("DoRA adapters of several stages cannot be added up into one", file=folder,
                        fix="leave `--onto base` out, or export the merged model")  # fmt: skip
    scale = float(settings["lora_alpha"]) / (math.sqrt(settings["r"]) if settings.get("use_rslora") else settings["r"])
    layers = [name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)]
    return {name: Factors(tensors[name + UP].double() * scale, tensors[name + DOWN].double()) for name in layers}


def _dtype(folder: Path) -> torch.dtype:
    from safetensors import safe_open

    with safe_open(str(folder / WEIGHTS), "pt") as file:
        return torch.float32 if (first := next(iter(file.keys()), None)) is None else file.get_tensor(first).dtype
