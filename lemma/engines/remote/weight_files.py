"""Weights in files, in buckets that are gathered, written and sent one at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

BUCKET_BYTES = 2**30


def write_buckets(state: Mapping[str, torch.Tensor], dtype: torch.dtype, folder: Path, keep: bool) -> dict[str, str]:
    """Replace the weights in the folder, a bucket at a time, each file atomically. Returns the file of each name.

    If the weights are sharded, all ranks call this together, and get them in `dtype`; those with `keep` write.
    """
    buckets = _buckets({name: tensor.numel() * tensor.element_size() for name, tensor in state.items()})
    files: dict[str, str] = {}
    for number, names in enumerate(buckets, 1):
        file = "model.safetensors" if len(buckets) == 1 else f"model-{number:05}-of-{len(buckets):05}.safetensors"
        files |= dict.fromkeys(names, file)
        tensors = {name: whole_as(state[name], dtype).cpu().contiguous() for name in names}
        if keep:
            save_file(tensors, folder / "bucket.part", {"format": "pt"})
            os.replace(folder / "bucket.part", folder / file)
    return files


def _buckets(sizes: dict[str, int]) -> list[list[str]]:
    """The names in order, in buckets of at most `BUCKET_BYTES`, or of one larger tensor."""
    buckets: list[list[str]] = []
    full = BUCKET_BYTES
    for name, size in sizes.items():
        if full + size > BUCKET_BYTES:
            buckets.append([])
            full = 0
        buckets[-1].append(name)
        full += size
    return buckets


def whole_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The full tensor, gathered if it is sharded; shards may be kept in fp32."""
    return tensor.to(dtype).full_tensor() if hasattr(tensor, "full_tensor") else tensor
