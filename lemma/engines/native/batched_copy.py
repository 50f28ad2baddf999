"""Several arrays to the device in one copy: what a copy costs the host hardly depends on its size."""

from __future__ import annotations

import numpy as np
import torch

from lemma.models.packing import to_device

# Each array begins where the memory of a tensor of its own would, so that kernels find it aligned.
ALIGNED = 512


def copy_together(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """A tensor on the device for each array. The host does not wait for what the device does now."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    here = np.empty(end, dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=True):
        here[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    there = to_device(torch.from_numpy(here), device)
    return [
        there[start : start + array.nbytes].view(_TYPES[array.dtype.str]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


_TYPES = {
    np.dtype(name).str: kind
    for name, kind in (("int64", torch.int64), ("int32", torch.int32), ("float32", torch.float32))
}
