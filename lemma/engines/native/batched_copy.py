"""Several arrays copied to the device at once: what a copy costs the host hardly depends on its size."""

from __future__ import annotations

import numpy as np
import torch

from lemma.models.packing import to_device

# Alignment of each array in the copy, the same as torch's allocator gives a tensor of its own.
ALIGNED = 512


def copy_together(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """A tensor on the device for each array, without waiting for the device."""
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
