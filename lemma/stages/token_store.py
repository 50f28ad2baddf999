"""Token ids in files instead of memory: written once, one sequence at a time, then read on demand.

`ids.bin` (int32), `learnt.bin` (one byte per token) and `ends.bin` (int64, where each sequence ends) are memory-mapped;
`index.json` records what they were made from. A folder is complete or does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from lemma.core.files import write_whole
from lemma.core.types import Trajectory

IDS, LEARNT, ENDS, INDEX = "ids.bin", "learnt.bin", "ends.bin", "index.json"


class StoredTokens(Sequence[Trajectory]):
    """Trajectories in the files of a folder, read on demand."""

    def __init__(self, folder: Path):
        written: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self.key, self.facts = written["key"], written["facts"]
        self.digest: str = written["digest"]
        self.tokens: int = written["tokens"]
        empty = self.tokens == 0  # an empty file cannot be mapped
        self._ids = np.zeros(0, np.int32) if empty else np.memmap(folder / IDS, np.int32, "r")
        self._learnt = np.zeros(0, np.uint8) if empty else np.memmap(folder / LEARNT, np.uint8, "r")
        self._ends = np.zeros(0, np.int64) if empty else np.memmap(folder / ENDS, np.int64, "r")

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self._ends, prepend=0)

    @overload
    def __getitem__(self, place: int) -> Trajectory: ...
    @overload
    def __getitem__(self, place: slice) -> list[Trajectory]: ...
    def __getitem__(self, place: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        start, end = (int(self._ends[place - 1]) if place else 0), int(self._ends[place])
        ids, learnt = self._ids[start:end].astype(np.int64), self._learnt[start:end].astype(bool)
        return Trajectory(ids, learnt, origin="teacher", finish="given")


def stored(
    folder: Path, key: Any, build: Iterable[Trajectory], facts: Callable[[], Any] = lambda: None
) -> StoredTokens:
    """The sequences of `build` in this folder; not rebuilt if sequences with the same key are already there.

    `facts` is called once everything is built, and its result is stored with it.
    """
    try:
        tokens = StoredTokens(folder)
        if tokens.key == json.loads(json.dumps(key)):
            return tokens
    except (OSError, ValueError, KeyError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    end, whole = 0, hashlib.blake2b(digest_size=16)
    with open(partial / IDS, "wb") as ids, open(partial / LEARNT, "wb") as learnt, open(partial / ENDS, "wb") as ends:
        for one in build:
            end += len(one)
            ids.write(one.ids_T.astype(np.int32).tobytes())
            learnt.write(one.loss_mask_T.astype(np.uint8).tobytes())
            ends.write(np.int64(end).tobytes())
            whole.update(one.ids_T.tobytes() + one.loss_mask_T.tobytes())
    about = {"key": key, "facts": facts(), "digest": whole.hexdigest(), "tokens": end}
    write_whole(partial / INDEX, json.dumps(about) + "\n")
    os.replace(partial, folder)
    return StoredTokens(folder)
