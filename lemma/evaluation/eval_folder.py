"""Who owns an evaluation's folder: one evaluation, and one process at a time."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.files import leads_out, write_whole
from lemma.core.leaves import leaves
from lemma.evaluation.results import read_settings


def claim(folder: Path, identity: dict[str, Any], *, any_grader: bool = False) -> None:
    """Make the folder that of this evaluation; refuse where it is that of another.

    With `any_grader`, the same samples with the verdicts of another grader are the same evaluation.
    """
    there = read_settings(folder)
    if there is None:
        # A process that was killed while it wrote the settings leaves a hidden file.
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UserError(f"{folder} holds something other than an evaluation", fix="write --to and another folder")
        write_settings(folder, identity)
        return
    was, now = leaves(there), leaves(json.loads(json.dumps(identity)))
    for key in [*now, *was]:
        if any_grader and key.startswith("benchmarks.") and key.endswith(".grader"):
            continue
        if was.get(key) != now.get(key):
            raise UserError(
                f"{folder} holds another evaluation ({key} was {was.get(key)}, is {now.get(key)})",
                fix="write --to and another folder, or remove that one",
            )


def write_settings(folder: Path, identity: dict[str, Any]) -> None:
    write_whole(folder / "settings.json", json.dumps(identity, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two processes never write to one evaluation, and what a link in it leads to is not written."""
    for path in folder.rglob("*"):
        if leads_out(path, folder):
            raise UserError(f"{path} is a link that leads out of the evaluation", fix="write --to and another folder")
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"another process is working in {folder}", fix="wait for it, or write --to and another folder"
            ) from error
        yield
