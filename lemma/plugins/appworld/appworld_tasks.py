"""AppWorld's tasks on disk: splits, instructions and difficulties. No gold is read here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError, nearest

DATA = (
    "`appworld download data --root {root}`, with the `appworld` of {root}/venv/bin, brings the official data, "
    "where its store can be reached"
)


@dataclass(frozen=True, slots=True)
class AppTask:
    """One task: the instruction, who gives it, and when."""

    id: str
    instruction: str
    supervisor: Mapping[str, str]
    datetime: str
    difficulty: int | None = None

    @property
    def scenario(self) -> str:
        """Tasks of one scenario are the same with other values."""
        return self.id.partition("_")[0]


def load_task(root: Path, name: str) -> AppTask:
    folder = root / "data" / "tasks" / name
    specs = _read(folder / "specs.json")
    # Of the folder with the gold, the difficulty alone is read, and no agent sees it.
    metadata = folder / "ground_truth" / "metadata.json"
    difficulty = _read(metadata).get("difficulty") if metadata.is_file() else None
    supervisor = specs.get("supervisor") or specs["main_user"]
    return AppTask(name, specs["instruction"], supervisor, specs["datetime"], difficulty)


def check_data(root: Path) -> None:
    if not (root / "data" / "tasks").is_dir() or not (root / "data" / "datasets").is_dir():
        raise UserError(f"there is no data of AppWorld in '{root}'", fix=DATA.format(root=root))


def load_split(root: Path, split: str) -> list[AppTask]:
    """The tasks of a split, in its order."""
    folder = root / "data" / "datasets"
    path = folder / f"{split}.txt"
    if not path.is_file():
        check_data(root)
        there = sorted(one.stem for one in folder.glob("*.txt"))
        raise UserError(f"AppWorld has no split '{split}' in '{root}'", fix=nearest(split, there))
    names = [line.partition(":")[0].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [load_task(root, name) for name in names]


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"a file of AppWorld's data cannot be read: {error.strerror}", file=path) from None
    except ValueError:
        raise UserError("this file of AppWorld's data is not JSON", file=path) from None
    assert isinstance(values, dict)
    return values
