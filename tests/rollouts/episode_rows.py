"""Rows of the journal, written plainly: what `lemma.rollouts.journal_rows` is compared with."""

from __future__ import annotations

import base64
from typing import Any

from lemma.rollouts import Episode, Turn
from lemma.rollouts.journal_rows import ARRAYS, OF_EPISODE, OF_TURN


def row_of(episode: Episode) -> dict[str, Any]:
    row = {name: getattr(episode, name) for name in OF_EPISODE}
    row |= {name: list(row[name]) for name in ("key", "gold", "faults")}
    return row | {"turns": [_turn(turn) for turn in episode.turns]}


def _turn(turn: Turn) -> dict[str, Any]:
    row = {name: getattr(turn, name) for name in OF_TURN if name != "seconds"}
    for name, kind in ARRAYS.items():
        row[name] = base64.b64encode(row[name].astype(kind, copy=False).tobytes()).decode()
    row["versions"] = [list(span) for span in turn.versions]
    return {**row, "timings": {"seconds": turn.seconds}}
