"""One line of progress for all ranks: each leaves its counts in the evaluation's folder, and the first adds them up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lemma.core.ranks import is_leader, rank, world_size
from lemma.evaluation.eval_progress import Counts, Meter

SECONDS = 0.5


@contextmanager
def told_together(meter: Meter, folder: Path) -> Iterator[None]:
    """Within `with`, the first rank's meter also counts what the others do."""
    if world_size() == 1:
        yield
        return
    ended = threading.Event()
    others = [folder / f".progress-{number}.json" for number in range(1, world_size())]

    def work() -> None:
        while not ended.wait(SECONDS):
            with suppress(OSError):  # numbers for the eye are no reason to stop
                if is_leader():
                    meter.hear_others([_read(path) for path in others])
                else:
                    _write(others[rank() - 1], meter.counts)

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if not is_leader():
            others[rank() - 1].unlink(missing_ok=True)


def _write(path: Path, counts: Counts) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(counts))
    new.replace(path)


def _read(path: Path) -> Counts:
    return Counts(*json.loads(path.read_text())) if path.exists() else Counts()
