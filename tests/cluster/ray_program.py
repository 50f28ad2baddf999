"""What the ranks of the test run under Ray: they meet, add up, and the second one dies at the first two attempts. At
the second, the first one has begun a run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    attempt = len(list(folder.glob(f"rank-{rank}-*"))) + 1
    seen = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_PORT")]
    (folder / f"rank-{rank}-{attempt}").write_text(" ".join([f"{total.item():g}", *seen, *sys.argv[2:]]))
    print(f"rank {rank} attempt {attempt}", flush=True)
    if "--wrong" in sys.argv and rank == 0:
        print("error: one sentence", file=sys.stderr, flush=True)
        os._exit(2)  # gloo's threads may abort an interpreter that ends in the usual way
    if rank == 0 and attempt == 2:
        (folder / "run").mkdir()
        (folder / "run" / "run.json").touch()
    dist.barrier()
    if rank == 1 and attempt <= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


if __name__ == "__main__":
    main()
