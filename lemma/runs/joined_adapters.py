"""Joins the adapters of several stages into one, for the model that the first of them started from.

A later stage trains its adapter on the merged model of the previous one, so its adapter alone does not fit the original
model. The sum of the updates does: B1 A1 s1 + B2 A2 s2 + ..., whose rank is at most the sum of the ranks. The final
adapter of a stage is this sum, unless it holds more than low-rank factors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lemma.core.errors import UserError
from lemma.core.files import from_json, use_umask

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
    ranks, where factors stay as they are."""
    from safetensors.torch import save_file

    scales = {scale_of(folder) for folder in folders}
    scale = scales.pop() if len(scales) == 1 else 1.0
    parts = [_read(folder, scale) for folder in folders]
    names = sorted(set().union(*parts))
    whole = {name: joined([part[name] for part in parts if name in part]) for name in names}
    most = max(factors.down.shape[0] for factors in whole.values())
    rank = most if rank is None else min(rank, most)
    tensors: dict[str, torch.Tensor] = {}
    lost = total = 0.0
    for name, factors in whole.items():
        dtype = _dtype(folders[-1])
        small = padded(factors, rank) if rank == most else truncated(factors, rank)
        kept = Factors(*(part.to(dtype) for part in small))
        lost += difference(factors, Factors(kept.up.double(), kept.down.double())).norm() ** 2
        total += factors.norm() ** 2
        tensors[name + UP], tensors[name + DOWN] = kept.up.contiguous(), kept.down.contiguous()
    settings = from_json((target / SETTINGS).read_text())
    alpha = int(scale * rank) if (scale * rank).is_integer() else scale * rank
    settings |= {"r": rank, "lora_alpha": alpha, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    save_file(tensors, str(target / WEIGHTS), metadata={"format": "pt"})
    use_umask(target, WEIGHTS)
    (target / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return Joined(rank, math.sqrt(lost / total) if total else 0.0)


def put_on_base(adapter: Path, earlier: Sequence[Path], rank: int, base: str, revision: str | None) -> bool:
    """Make the adapter of a later stage one for the recipe's model; whether it and the earlier ones have a sum."""
    if not all(map(is_low_rank, [*earlier, adapter])):
        return False
    join_adapters([*adapters_before(earlier, rank), adapter], adapter, None)
    name_base(adapter, base, revision)
    return True


def name_base(folder: Path, name: str, revision: str | None) -> None:
    """Write the base model into an adapter's settings."""
    settings = {**_settings(folder), "base_model_name_or_path": name, "revision": revision}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def adapters_before(folders: Sequence[Path], rank: int) -> list[Path]:
    """Those of the final adapters of earlier stages, the first first, whose sum leads from the recipe's model to the
    last of them. One with more than the recipe's `rank` is a sum already."""
    sums = [number for number, folder in enumerate(folders) if _settings(folder)["r"] > rank]
    return list(folders[max(sums, default=0) :])


def is_low_rank(folder: Path) -> bool:
    """Whether an adapter is there, and is low-rank factors and nothing else: with a magnitude or with whole modules it
    has no sum."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(folder / WEIGHTS), "pt") as file:
            return all(name.endswith((DOWN, UP)) for name in file.keys())  # noqa: SIM118 (the file is no mapping)
    except (OSError, SafetensorError):
        return False


def joined(parts: Sequence[Factors]) -> Factors:
    """The sum of low-rank matrices as one."""
    return Factors(torch.cat([part.up for part in parts], dim=1), torch.cat([part.down for part in parts], dim=0))


def difference(one: Factors, other: Factors) -> Factors:
    return joined([one, Factors(-other.up, other.down)])


def truncated(factors: Factors, rank: int) -> Factors:
    """The nearest matrix of at most this rank, by a singular value decomposition of the small core, as so many
    factors."""
    left, core_left = torch.linalg.qr(factors.up)
    right, core_right = torch.linalg.qr(factors.down.T)
    u, sizes, v = torch.linalg.svd(core_left @ core_right.T)
    keep = min(rank, len(sizes))
    root = sizes[:keep].sqrt()
    up, down = (left @ u[:, :keep]) * root, (root[:, None] * v[:keep]) @ right.T
    return padded(Factors(up, down), rank)


def padded(factors: Factors, rank: int) -> Factors:
    """The same matrix as so many factors, the last of them 0 if need be."""
    up, down = factors
    missing = rank - len(down)
    return Factors(
        torch.cat([up, up.new_zeros(up.shape[0], missing)], dim=1),
        torch.cat([down, down.new_zeros(missing, down.shape[1])], dim=0),
    )


def scale_of(folder: Path) -> float:
    """What an adapter multiplies its factors by."""
    settings = _settings(folder)
    rank = settings["r"]
    return float(settings["lora_alpha"]) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _settings(folder: Path) -> Mapping[str, Any]:
    try:
        settings: Mapping[str, Any] = from_json((folder / SETTINGS).read_text())
        return settings
    except (OSError, ValueError) as error:
        raise _broken(folder, error) from error


def _read(folder: Path, scale: float) -> dict[str, Factors]:
    """The updates of one adapter by layer, in double precision, divided by `scale`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(folder / WEIGHTS))
    except (OSError, SafetensorError) as error:
        raise _broken(folder, error) from error
    if not is_low_rank(folder):
        kind = "DoRA adapters" if _settings(folder).get("use_dora") else "adapters with whole modules"
        raise UserError(
            f"{kind} of several stages cannot be added up into one",
            file=folder,
            fix="leave `--onto base` out, or export the merged model",
        )
    times = scale_of(folder) / scale
    layers = [name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)]
    return {name: Factors(tensors[name + UP].double() * times, tensors[name + DOWN].double()) for name in layers}


def _broken(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"the adapter of an earlier stage is missing or broken ({error})", file=folder, fix="train that stage again"
    )


def _dtype(folder: Path) -> torch.dtype:
    from safetensors import safe_open

    with safe_open(str(folder / WEIGHTS), "pt") as file:
        return torch.float32 if (first := next(iter(file.keys()), None)) is None else file.get_tensor(first).dtype
