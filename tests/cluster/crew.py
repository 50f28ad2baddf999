"""Four processes that are ranks, started once: each piece of work is done by the first 1, 2, 3 or 4 of them."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.preloaded import CONTEXT

SIZES = (1, 2, 3, 4)
DEADLINE = 60.0


class Crew:
    """`run` does the same work on several ranks and gives what each of them returned."""

    def __init__(self, folder: Path, size: int = 4):
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            mine, its = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_live, args=(rank, size, str(folder / "meet"), its), daemon=True)
            process.start()
            self._ends.append(mine)
            self._processes.append(process)

    def run(self, ranks: int, work: Callable[..., Any], *args: Any, slots: int | None = None) -> list[Any]:
        for end in self._ends[:ranks]:
            end.send((ranks, slots or ranks, work, args))
        found = []
        for rank, end in enumerate(self._ends[:ranks]):
            assert end.poll(DEADLINE), f"rank {rank} of {ranks} does not answer"
            result, trouble = end.recv()
            assert trouble is None, f"rank {rank} of {ranks}:\n{trouble}"
            found.append(result)
        return found

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            process.kill()


def _live(rank: int, size: int, meeting: str, end: Connection) -> None:
    import torch
    import torch.distributed as dist

    from lemma.core.ranks import RankWorld, joined

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=limit)
    sizes = [count for count in SIZES if count <= size]
    groups, asides = ({count: dist.new_group(list(range(count)), timeout=limit) for count in sizes} for _ in range(2))
    while True:
        try:
            ranks, slots, work, args = end.recv()
        except EOFError:
            return
        try:
            with joined(RankWorld(rank, ranks, slots, groups[ranks], groups[ranks], asides[ranks])):
                end.send((work(*args), None))
        except BaseException:  # noqa: BLE001 (told to the test, which fails with it)
            end.send((None, traceback.format_exc()))
