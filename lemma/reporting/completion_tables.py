"""A few completions of a step as rows of a table, for loggers that show tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.rollouts.journal_reader import read_episodes, step_journals

# Rows of a table, and steps between two tables.
ROWS, EVERY = 16, 10
COLUMNS = ("step", "problem", "completion", "answer", "gold", "verdict", "reward")


def is_due(step: int) -> bool:
    return step == 1 or step % EVERY == 0


def completion_rows(run_dir: Path, stage: str, step: int, most: int = ROWS) -> list[dict[str, Any]]:
    """The first completions of a step's journal; none if the stage samples nothing or the journal is gone."""
    rows: list[dict[str, Any]] = []
    try:
        paths = step_journals(run_dir / "stages" / stage / "journal", step)
        for episode in (episode for path in paths for episode in read_episodes(path)):
            if len(rows) == most:
                break
            said = (episode.text, episode.answer or "", " | ".join(episode.gold), episode.verdict or "")
            reward = float("nan") if episode.reward is None else float(episode.reward)
            rows.append(dict(zip(COLUMNS, (step, episode.problem_id, *said, reward), strict=True)))
    except (OSError, UserError):
        return []
    return rows
