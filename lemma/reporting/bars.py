"""Progress bars on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console as Terminal
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.text import Text

from lemma.reporting.console import Pace, duration


class _Line(ProgressColumn):
    """All of a task in one line that fits the terminal."""

    def __init__(self, terminal: Terminal):
        super().__init__()
        self._terminal = terminal

    def render(self, task: Task) -> Text:
        pace: Pace | None = task.fields["pace"]
        if pace is None:
            waited = f"{task.description}: {task.fields['note']}, {duration(task.elapsed or 0.0)}"
            return Text(waited, no_wrap=True, overflow="crop")
        front, bar, rest = progress_line(task.description, pace, task.fields["note"], self._terminal.width - 1)
        if not self._terminal.encoding.lower().startswith("utf"):
            bar = bar.replace("━", "#").replace("─", "-")
        return Text.assemble(front, (bar, "cyan"), rest, no_wrap=True, overflow="crop")


class Bars:
    """Progress bars at the bottom of a terminal, with sentences scrolling by above them."""

    def __init__(self, stream: TextIO):
        terminal = Terminal(file=stream, force_terminal=True, highlight=False)
        self._progress = Progress(_Line(terminal), console=terminal, refresh_per_second=4, transient=True)
        self._bars: dict[str, tuple[TaskID, Pace]] = {}
        # What is waited for by a stage that has no bar.
        self._waiting: TaskID | None = None

    def say(self, text: str, style: str = "") -> None:
        self._progress.console.print(Text(text, style=style))

    def begin(self, what: str, done: int, total: int) -> None:
        self.end(what)
        self._progress.start()
        pace = Pace(done, total)
        self._bars[what] = self._progress.add_task(what, total=total, completed=done, pace=pace, note=""), pace

    def reach(self, what: str, done: int, total: int, note: str, share: float | None = None) -> None:
        """Update a bar, or make one; it is removed when its work is done."""
        if what not in self._bars:
            self.begin(what, done, total)
        task, pace = self._bars[what]
        pace.reach(done, total, share)
        self._progress.update(task, completed=done, total=total, note=note)
        if done >= total:
            self.end(what)

    def wait(self, stage: str, what: str) -> None:
        """Show what is waited for beside the stage's bar or, where it has none, in the place of one."""
        self._forget_waiting()
        if stage in self._bars:
            task, pace = self._bars[stage]
            (pace.pause if what else pace.go_on)()
            self._progress.update(task, note=what)
        elif what:
            self._progress.start()
            self._waiting = self._progress.add_task(stage, total=None, pace=None, note=what)

    def _forget_waiting(self) -> None:
        if self._waiting is not None:
            self._progress.remove_task(self._waiting)
            self._waiting = None
            self._rest()

    def _rest(self) -> None:
        if not self._bars and self._waiting is None:
            self._progress.stop()

    def end(self, what: str) -> None:
        if what in self._bars:
            self._progress.remove_task(self._bars.pop(what)[0])
            self._rest()

    def close(self) -> None:
        self._forget_waiting()
        for what in list(self._bars):
            self.end(what)


def fitting(parts: Iterable[str], room: int) -> str:
    """As many of these as fit, in order."""
    text = ""
    for part in parts:
        longer = f"{text}, {part}" if text else part
        if len(longer) > room:
            break
        text = longer
    return text


def progress_line(what: str, pace: Pace, note: str, width: int) -> tuple[str, str, str]:
    """A progress line that fits into `width` columns: the text before the bar, the bar, and the text after it. The
    name, the progress and the remaining time are always shown; numbers are dropped first."""
    room = min(24, max(6, (width - 50) // 3))
    name = what if len(what) <= 18 else what[:17] + "…"
    full = round(room * min(max(pace.share, 0.0), 1.0))
    front, bar = f"{name} ", "━" * full + "─" * (room - full)
    counted = f" {pace.done:,}/{pace.total:,}"
    wanted = [part for part in (pace.left, pace.speed, *note.split(", ")) if part]
    rest = fitting(wanted, width - len(front) - len(bar) - len(counted) - 2)
    return front, bar, counted + (f"  {rest}" if rest else "")
