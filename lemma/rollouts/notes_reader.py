"""What the updates of a step made of each token, as people read it: the files of `token_notes`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from lemma.rollouts.token_notes import mark_of, notes_path

Attempt = tuple[int, int]


@dataclass(frozen=True)
class Noted:
    """What is known of one sample's tokens, those that a teacher said included; `ratio` may be unknown."""

    advantage: np.ndarray
    engine: np.ndarray
    ratio: np.ndarray | None
    mark: int

    def is_about(self, ids: np.ndarray) -> bool:
        return len(ids) == len(self.advantage) and mark_of(ids) == self.mark


def read_notes(folder: Path, step: int) -> dict[Attempt, Noted]:
    """By draw and number of a sample; nothing where there is no file, or it is damaged."""
    try:
        with np.load(notes_path(folder, step), allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        return _by_attempt(columns)
    except (OSError, ValueError, KeyError, EOFError, IndexError, RuntimeError, zlib.error, BadZipFile):
        return {}


def _by_attempt(columns: Mapping[str, np.ndarray]) -> dict[Attempt, Noted]:
    ends = np.cumsum(columns["length"])[:-1]
    parts = {name: np.split(columns[name], ends) for name in ("advantage", "engine", "ratio") if name in columns}
    ratios: Sequence[np.ndarray | None] = parts["ratio"] if "ratio" in parts else [None] * len(columns["length"])
    return {
        (int(draw), int(number)): Noted(advantage, engine, ratio, int(mark))
        for (draw, number), advantage, engine, ratio, mark in zip(
            columns["attempt"], parts["advantage"], parts["engine"], ratios, columns["mark"], strict=True
        )
    }
