"""The one class of errors that people see, and the one class of warnings that tests turn into errors."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class UserError(Exception):
    """Something the user can repair: one sentence that says what is wrong, where, and what to write instead.

    The command line prints it without a traceback and exits with 2.
    """

    def __init__(
        self, problem: str, *, file: str | Path | None = None, line: int | None = None, fix: str | None = None
    ):
        self.problem, self.file, self.line, self.fix = problem, file, line, fix
        place = "" if file is None else f"{file}:{line}: " if line is not None else f"{file}: "
        hint = "" if fix is None else f"; {fix}"
        super().__init__(" ".join(f"{place}{problem}{hint}".split()))


class LemmaWarning(UserWarning):
    """Something worth a look that does not stop a run."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A phrase that offers the valid name closest to a wrong one, or lists them all."""
    names = sorted(valid)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return "write one of: " + ", ".join(names) if names else "there is nothing to choose from"
