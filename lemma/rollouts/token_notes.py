"""What the updates of a step made of each token, on disk beside the journal, for people to look at.

Of each token that was learnt from: its advantage; what the learner gave it over what the engine that sampled it did
(`engine`); and, where a batch is used more than once, the policy over the old one when it was last learnt from
(`ratio`). Ratios are natural logarithms. Training never reads these files; a step that is repeated writes
its own again.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lemma.core.files import write_whole
from lemma.core.types import Group, Trajectory

NOTES = "notes"
"""The folder, beside that of the journal."""
# Differences below this are rounding of the engine and the learner; without them files are smaller.
DIGITS = 4


@dataclass
class TokenNotes:
    """Collects what the updates of one step find, and writes it."""

    _first: dict[int, np.ndarray] = field(default_factory=dict)
    _last: dict[int, np.ndarray] = field(default_factory=dict)

    def take(self, trajectories: Sequence[Trajectory], logprobs: Sequence[np.ndarray]) -> None:
        """Log-probabilities of the tokens that an update learns from, as it found them."""
        for trajectory, found in zip(trajectories, logprobs, strict=True):
            self._first.setdefault(id(trajectory), found)
            self._last[id(trajectory)] = found

    def write(self, folder: Path, step: int, groups: Sequence[Group]) -> None:
        """The file of a step, whole or not at all."""
        attempts = [episode for group in groups for episode in group.episodes if episode[0].attempt is not None]
        trajectories = [one for episode in attempts for one in episode]
        ids = [np.concatenate([one.ids_T[one.loss_mask_T] for one in episode]) for episode in attempts]
        columns: dict[str, np.ndarray] = {
            "attempt": np.array([episode[0].attempt for episode in attempts], dtype=np.int32).reshape(-1, 2),
            "length": np.array([len(said) for said in ids], dtype=np.int32),
            "mark": np.array([mark_of(said) for said in ids], dtype=np.uint32),
            "advantage": _halved([one.read("advantage") for one in trajectories]),
            "engine": _halved([self._engine(one) for one in trajectories]),
        }
        if any("old" in one.token_fields for one in trajectories):
            columns["ratio"] = _halved([self._ratio(one) for one in trajectories])
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **columns)
        write_whole(notes_path(folder, step), buffer.getvalue())

    def _engine(self, trajectory: Trajectory) -> np.ndarray:
        """What the learner gave its tokens before it learnt from them over what the engine gave; unknown where a
        teacher spoke."""
        found = trajectory.read("old") if "old" in trajectory.token_fields else self._first.get(id(trajectory), np.nan)
        drawn = trajectory.read("sampler_logprobs") + trajectory.read("log_kept_mass")
        return np.where(trajectory.read("off") > 0, np.nan, found - drawn)

    def _ratio(self, trajectory: Trajectory) -> np.ndarray:
        """What the policy gave them when they were last learnt from, over the old one."""
        old = trajectory.read("old") if "old" in trajectory.token_fields else np.full(trajectory.trained_tokens, np.nan)
        return np.asarray(self._last.get(id(trajectory), np.nan) - old)


def notes_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.npz"


def _halved(parts: Sequence[np.ndarray]) -> np.ndarray:
    """All of these in half precision: three digits are more than a colour shows."""
    whole = np.concatenate([np.zeros(0), *parts])
    return np.clip(np.round(whole, DIGITS), -6e4, 6e4).astype(np.float16)


def mark_of(ids: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
