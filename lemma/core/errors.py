"""The one class of errors that people see, and the one class of warnings that tests turn into errors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

from lemma.core.terminal import visible


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
        super().__init__(visible(" ".join(f"{place}{problem}{hint}".split())))


class Interruption(BaseException):
    """Raised by a signal or a deadline into whatever runs at that moment, and never a fault of that. Not an Exception:
    code that forgives every error must not forgive this one."""


class SeveralErrors(UserError):
    """Several of them that were found at the same time, a line each; `problem`, `file`, `line` and `fix` are those of
    the first."""

    def __init__(self, errors: Sequence[UserError]):
        first = errors[0]
        super().__init__(first.problem, file=first.file, line=first.line, fix=first.fix)
        self.errors = tuple(errors)
        self.args = ("\n".join(map(str, errors)),)

    def __reduce__(self) -> tuple[type[SeveralErrors], tuple[tuple[UserError, ...]]]:
        return type(self), (self.errors,)  # processes send them to each other


class LemmaWarning(UserWarning):
    """Something worth a look that does not stop a run."""


def warn(message: str) -> None:
    """A LemmaWarning at the line of the user's program that called Lemma: lines of Lemma say nothing to its author."""
    frame: FrameType | None = sys._getframe()
    depth = level = 1
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "lemma":
            level = depth + 1
        frame, depth = frame.f_back, depth + 1
    warnings.warn(visible(message), LemmaWarning, stacklevel=level)


@contextmanager
def warnings_said(say: Callable[[str], None]) -> Iterator[None]:
    """Within `with`, Lemma's own warnings are sentences, without a place in the code; others stay as they are."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def hear(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, LemmaWarning):
                say(str(message))
            else:
                show(visible(str(message)), category, *place, **more)

        warnings.showwarning = hear
        yield


# What people write who know other programs.
MEANT = {"gpu": "cuda", "reinforcement": "rl", "reinforcement_learning": "rl", "sft": "supervised"}
MEANT |= dict.fromkeys(("math", "correct", "correctness", "exact_match"), "accuracy")

MANY = 20


def nearest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """A phrase that offers the valid name closest to a wrong one, or lists them all, each after `prefix`."""
    names = sorted(valid)
    if MEANT.get(name) in names:
        return f"write '{MEANT[name]}'"
    cutoff = 0.65 if len(names) <= MANY else 0.5  # a long list helps less than a poor guess
    close = get_close_matches(name, names, n=5, cutoff=cutoff)
    close.sort(key=lambda one: sorted(one) != sorted(name))  # letters that changed places come first
    if close:
        return f"did you mean '{prefix}{close[0]}'?"
    return "write one of: " + ", ".join(prefix + one for one in names) if names else "check the spelling"


def nearest_file(name: str, names: Iterable[str]) -> str | None:
    """The file of nearly the same name: endings, which most files share, make no two of them alike."""
    by_stem = {other.partition(".")[0]: other for other in sorted(names, reverse=True)}
    close = get_close_matches(name.partition(".")[0], by_stem, n=1, cutoff=0.6)
    return by_stem[close[0]] if close else None
