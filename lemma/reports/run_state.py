"""Whether a run is running, stopped cleanly, finished or dead, and what its log says about it."""

from __future__ import annotations

import fcntl
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lemma.core.errors import UserError
from lemma.reports.tailed import TailedFile

State = Literal["running", "stopped", "finished", "dead", "new", "unreadable"]

LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (\w+) +(.*)$")
STARTED = re.compile(r"^(\S+): (?:(?:resumes|goes on) after step \d+ of (\d+)|(\d+) steps)$")
STOPPED = ("stopped after saving", "stopped before the next stage")
STEP = re.compile(r"^step (\d+): ")


@dataclass(frozen=True)
class Remark:
    """A warning or an error in the log; `step` if it names one."""

    time: str
    level: str
    stage: str
    step: int | None
    text: str


class Log:
    """The content of run.log: warnings, how many steps each stage has, and how the last process ended."""

    def __init__(self, path: Path):
        self._file = TailedFile(path)
        self.remarks: list[Remark] = []
        self.totals: dict[str, int] = {}
        self.ending = ""
        self.last_time = ""
        self._stage = ""

    def look(self) -> None:
        for line in self._file.look():
            match = LINE.match(line.decode("utf-8", "replace"))
            if match is None:
                continue
            self.last_time, level, text = match.groups()
            if level in ("warning", "error"):
                step = STEP.match(text)
                number = int(step.group(1)) if step else None
                said = text[step.end() :] if step else text
                self.remarks.append(Remark(self.last_time, level, self._stage, number, said))
            elif started := STARTED.match(text):
                self._stage, self.ending = started[1], ""
                self.totals[self._stage] = int(started[2] or started[3])
            elif text.startswith("the model is in "):
                self.ending = "finished"
            elif any(words in text for words in STOPPED):
                self.ending = "stopped"


def is_locked(folder: Path) -> bool:
    """Whether a process is working in the folder. Nothing is written, and the lock is released immediately."""
    try:
        with open(folder / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def state_of(folder: Path, stages: list[str], ending: str) -> State:
    """The state of a run, by its lock, its finished stages and the end of its log."""
    if is_locked(folder):
        return "running"
    if stages and all((folder / "stages" / name / "done.json").is_file() for name in stages):
        return "finished"
    if ending in ("finished", "stopped"):
        return "finished" if ending == "finished" else "stopped"
    return "dead" if (folder / "metrics.jsonl").is_file() else "new"


def is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() and (folder / "run.json").is_file()


def check_is_run(folder: Path) -> None:
    if not is_run(folder):
        raise UserError(
            f"{folder} is not the folder of a run", fix="give the folder that `run.dir` of the recipe names"
        )
