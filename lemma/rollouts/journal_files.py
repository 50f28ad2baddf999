"""The files of a stage's journals: those of finished steps are compressed, and only so many of them stay."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterable
from pathlib import Path

from lemma.core.faults import fault_point
from lemma.core.files import write_whole

COMPRESSED = ".gz"
# Tokens and their log-probabilities are close to random: a higher level takes longer and saves next to nothing.
LEVEL = 3
NAME = re.compile(r"step-(\d+)(?:\.slot-\d+)?\.jsonl(\.gz)?")


def journal_path(folder: Path, step: int, slot: int | None = None) -> Path:
    """Where a step's journal is written; `find` knows where it is afterwards. Of several slots each has its own."""
    return folder / (f"step-{step:06d}.jsonl" if slot is None else f"step-{step:06d}.slot-{slot:03d}.jsonl")


def step_journals(folder: Path, step: int) -> list[Path]:
    """The journals of one step, in the order of slots."""
    return list_journals(folder.glob(f"step-{step:06d}.*"))


def step_of(path: Path) -> int | None:
    """The step whose journal this is; None where it is none."""
    match = NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def find(path: Path) -> Path | None:
    """The file of a journal, compressed or not."""
    return next((one for one in (path, _compressed(path)) if one.is_file()), None)


def list_journals(paths: Iterable[Path]) -> list[Path]:
    """The journals among these files, each once and in order."""
    shown = {path for path in paths if not path.name.startswith(".") and path.name.endswith((".jsonl", ".jsonl.gz"))}
    return sorted(path for path in shown if path.suffix != COMPRESSED or path.with_suffix("") not in shown)


def tidy(folder: Path, step: int, keep: int | None, needed_after: int) -> None:
    """Compress the journals up to `step`, and remove those beyond the newest `keep`.

    What was sampled after step `needed_after` stays: a run that goes on from there reads it.
    """
    for torn in folder.glob(".step-*.tmp"):  # of a process that died while it compressed
        torn.unlink()
    for path in sorted(folder.glob("step-*")):
        match = NAME.fullmatch(path.name)
        if match is None or int(match[1]) > step:
            continue
        if keep is not None and int(match[1]) <= min(step - keep, needed_after):
            path.unlink()
        elif match[2] is None:
            _compress(path)


def _compress(path: Path) -> None:
    write_whole(_compressed(path), gzip.compress(path.read_bytes(), LEVEL, mtime=0))
    fault_point("journal.compressed")
    path.unlink()


def _compressed(path: Path) -> Path:
    return path.with_name(path.name + COMPRESSED)


def remove(path: Path) -> None:
    """Remove the compressed file of a journal that is to be written anew."""
    if _compressed(path).exists():
        os.unlink(_compressed(path))


def read_bytes(path: Path) -> bytes:
    """What was written, before compression; OSError, EOFError or zlib.error where the file is damaged."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.endswith(COMPRESSED) else data
