"""The GPU of a thread. A thread begins on the first GPU, whichever its rank computes on."""

from __future__ import annotations

import sys
from typing import Any


def gpu_of_thread() -> int | None:
    """The GPU that "cuda" names in this thread; None where this process has used no GPU so far."""
    cuda = _cuda()
    return None if cuda is None else int(cuda.current_device())


def use_gpu(number: int | None) -> None:
    """Let "cuda" name this GPU in this thread."""
    cuda = _cuda()
    if cuda is not None and number is not None and cuda.current_device() != number:
        cuda.set_device(number)


def _cuda() -> Any:
    """`torch.cuda` where it is at work: neither torch nor a GPU is touched by asking."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None
