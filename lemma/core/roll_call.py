"""Whether all ranks have the same before them: one folder that each writes to, and equal content of what each reads."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lemma.core.errors import UserError
from lemma.core.ranks import from_leader, gather_over_ranks, rank, together, world_size

# How long a network file system may take to show what another machine has written.
SEEN_SECONDS = 3.0
PLACE = "the shared folder"


def check_alike(mine: Mapping[str, str], whose: str = "") -> None:
    """Refuse to go on where a rank has read something else than the first one. `mine` has a mark of each content, by a
    name for people; `whose` work it is may stand in front of the sentence. Every rank must call this alike."""
    everybody = gather_over_ranks((socket.gethostname(), dict(mine)), "what ranks have read")
    first, marks = everybody[0]
    for number, (host, others) in enumerate(everybody):
        for what in [*marks, *others]:
            if marks.get(what) != others.get(what):
                raise UserError(
                    f"{whose}{': ' * bool(whose)}rank {number} on {host} finds other content for {what} than rank 0 "
                    f"on {first}",
                    fix="let all machines read the same files",
                )


def roll_call(folder: Path, option: str) -> None:
    """Refuse a folder that machines do not share or cannot write to; `option` is where it is named. What was not there
    before is not there after a refusal. Every rank must call this alike."""
    token = from_leader(lambda: secrets.token_hex(8), PLACE)
    made: list[Path] = []

    def file_of(number: int) -> Path:
        return folder / f".seen-{token}-{number}"

    def write() -> str:
        try:
            made.extend(path for path in (folder, *folder.parents) if not path.exists())
            folder.mkdir(parents=True, exist_ok=True)
            file_of(rank()).touch()
        except OSError as error:
            raise UserError(
                f"rank {rank()} on {socket.gethostname()} cannot write to {folder} ({error.strerror})",
                fix=f"set {option} to a folder that all machines share and may write to",
            ) from error
        return socket.gethostname()

    try:
        hosts = together(write, PLACE)
        asked = range(1, world_size()) if rank() == 0 else [0]
        unseen = next((number for number in asked if not _is_seen(file_of(number))), None)
        for number, other in enumerate(gather_over_ranks(unseen, PLACE)):
            if other is not None:
                whose = f"what rank {other} on {hosts[other]} writes"
                raise UserError(
                    f"rank {number} on {hosts[number]} does not see {whose} to {folder}",
                    fix=f"set {option} to a folder that all machines share",
                )
    except UserError:  # which all ranks raise
        _forget(file_of(rank()))
        gather_over_ranks(None, PLACE)  # some may share it: it is empty when the files of all are gone
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise
    finally:
        _forget(file_of(rank()))


def _forget(file: Path) -> None:
    with suppress(OSError):  # it may be where nobody may write
        file.unlink(missing_ok=True)


def _is_seen(path: Path) -> bool:
    until = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True
