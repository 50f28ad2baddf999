"""Many tensors copied to host memory and written to disk by several threads at once: one is slower than memory and
most disks. Copying, hashing and writing let go of Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from lemma.core.faults import fault_point
from lemma.core.ranks import rank, world_size
from lemma.core.whole_files import AT_ONCE, sync_file
from lemma.learning.manifest import fingerprint

# What one thread copies at a time, and from how many bytes on a further file is worth it.
BLOCK, FILE = 1 << 25, 1 << 28


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous copies in host memory that later updates do not touch."""
    sources = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    copies = {name: torch.empty_like(source, device="cpu") for name, source in sources.items()}
    blocks = [
        (_bytes_of(source)[start : start + BLOCK], _bytes_of(copies[name])[start : start + BLOCK])
        for name, source in sources.items()
        for start in range(0, source.nbytes, BLOCK)
    ]
    gpu = next((source.device for source in sources.values() if source.is_cuda), None)
    if gpu is not None:
        torch.cuda.synchronize(gpu)  # the threads read in streams of their own
    lanes = min(AT_ONCE, -(-sum(copy.nbytes for copy in copies.values()) // BLOCK))
    _in_threads([partial(_copy, blocks[lane::lanes], gpu) for lane in range(lanes)])
    return copies


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _copy(blocks: Sequence[tuple[torch.Tensor, torch.Tensor]], gpu: torch.device | None) -> None:
    """Copy blocks of bytes; those of a GPU by way of pinned memory, which is several times as fast."""
    with nullcontext() if gpu is None else torch.cuda.stream(torch.cuda.Stream(gpu)):
        pinned = None if gpu is None else torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        for source, copy in blocks:
            if pinned is not None and source.is_cuda:
                near = pinned[: len(source)]
                near.copy_(source, non_blocking=True)
                torch.cuda.current_stream(gpu).synchronize()
            else:
                near = source
            np.copyto(copy.numpy(), near.numpy())


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Write this rank's tensors of a checkpoint to one file or, where they are many bytes, to several at once, and sync
    them. Their names and marks."""
    parts = _deal(tensors)
    names = [f"tensors-{rank() + number * world_size()}.safetensors" for number in range(len(parts))]
    if len(parts) == world_size() == 1:
        names = ["tensors.safetensors"]
    marks: dict[str, dict[str, Any]] = {}

    def write(number: int) -> None:
        path = folder / names[number]
        save_file(parts[number], path)
        if number == 0:
            fault_point("checkpoint.mid_write")
        marks[path.name] = fingerprint(path)
        sync_file(path)

    _in_threads([partial(write, number) for number in range(len(parts))])
    return marks


def _deal(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Parts of about as many bytes each, at least one."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(max(1, min(AT_ONCE, total // FILE)))]
    sizes = [0] * len(parts)
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        lightest = sizes.index(min(sizes))
        parts[lightest][name] = tensor
        sizes[lightest] += tensor.nbytes
    return [part for part in parts if part] or [{}]


def _in_threads(tasks: Sequence[Callable[[], None]]) -> None:
    """Do all of them at once; what one raises is raised when all have ended."""
    with ThreadPoolExecutor(max(1, len(tasks)), thread_name_prefix="tensors") as threads:
        for done in [threads.submit(task) for task in tasks]:
            done.result()
