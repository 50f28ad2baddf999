"""Whether all ranks see the same folder: each leaves a file there, and looks for that of the first."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

from lemma.core.errors import UserError
from lemma.core.ranks import from_leader, gather_over_ranks, rank, together, world_size

# How long a network file system may take to show what another machine has written.
SEEN_SECONDS = 3.0


def roll_call(folder: Path, option: str) -> None:
    """Refuse a folder that machines do not share or cannot write to; `option` is where it is named. Every rank must
    call this alike."""
    if world_size() == 1:
        return
    token = from_leader(lambda: secrets.token_hex(8), "the shared folder")

    def file_of(number: int) -> Path:
        return folder / f".seen-{token}-{number}"

    def write() -> str:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file_of(rank()).touch()
        except OSError as error:
            raise UserError(
                f"rank {rank()} on {socket.gethostname()} cannot write to {folder} ({error.strerror})",
                fix=f"set {option} to a folder that all machines share and may write to",
            ) from error
        return socket.gethostname()

    try:
        hosts = together(write, "the shared folder")
        asked = range(1, world_size()) if rank() == 0 else [0]
        unseen = next((number for number in asked if not _is_seen(file_of(number))), None)
        for number, other in enumerate(gather_over_ranks(unseen, "the shared folder")):
            if other is not None:
                whose = f"what rank {other} on {hosts[other]} writes"
                raise UserError(
                    f"rank {number} on {hosts[number]} does not see {whose} to {folder}",
                    fix=f"set {option} to a folder that all machines share",
                )
    finally:
        file_of(rank()).unlink(missing_ok=True)


def _is_seen(path: Path) -> bool:
    until = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True
