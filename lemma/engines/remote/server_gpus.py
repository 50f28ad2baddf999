"""Which GPU a server gets that Lemma starts on the machine of its ranks."""

from __future__ import annotations

import os

from lemma.engines.protocol import EngineError
from lemma.engines.remote.server_options import ServerOptions

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_of_servers(device: str, options: ServerOptions, number: int, present: int | None = None) -> dict[str, str]:
    """The variable that makes only its own GPU visible to server `number`. A single server without `gpus` sees what the
    trainer sees.

    `present` is the number of GPUs that this process sees.
    """
    count = options.server_count
    if device == "cpu" or (options.gpus is None and count == 1):
        return {}
    names = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    if not names:
        names = [str(index) for index in range(_count() if present is None else present)]
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    chosen = options.gpus if options.gpus is not None else list(range(ranks, ranks + count))
    if chosen[number] >= len(names):
        raise EngineError(
            f"there is no GPU {chosen[number]} for generation server {number + 1} of {count}: {len(names)} are there,"
            f" and the ranks have the first {ranks}",
            fix="start fewer servers or ranks, or name the servers' GPUs with `gpus`",
        )
    return {VISIBLE: names[chosen[number]]}


def _count() -> int:
    import torch

    return torch.cuda.device_count()
