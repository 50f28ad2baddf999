"""Text that somebody else wrote, on a terminal: what a terminal would obey, or what hides how a line reads, is shown by
its number."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO, cast

# Control characters but the tab and the end of a line, and those that turn the direction of what follows them.
_CODES = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)
_SHOWN = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CODES}


def visible(text: str) -> str:
    return text.translate(_SHOWN)


class VisibleStream:
    """A stream on which all text is `visible`. What colours its own lines writes to `unescaped(stream)`."""

    def __init__(self, stream: TextIO):
        self.unescaped = stream

    def write(self, text: str) -> int:
        self.unescaped.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.unescaped.writelines(map(visible, lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


def unescaped(stream: TextIO) -> TextIO:
    """The stream below a `VisibleStream`; any other as it is."""
    return cast("TextIO", getattr(stream, "unescaped", stream))


class VisibleRecord(logging.LogRecord):
    """A line of a library's log, which may quote anything that it has read, as may the error under it."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        if self.exc_info and self.exc_info[0] is not None:
            self.exc_text = visible("".join(traceback.format_exception(*self.exc_info)).rstrip("\n"))

    def getMessage(self) -> str:
        return visible(super().getMessage())


@contextmanager
def visible_logs() -> Iterator[None]:
    """Within `with`, what libraries log is `visible`. Bars go to the same stream, and move the cursor of a terminal."""
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(VisibleRecord)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)


def show_error(kind: type[BaseException], error: BaseException | None, place: TracebackType | None) -> None:
    """Python's own words about an error that nobody has explained, `visible`."""
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, place))))


def show_thread_error(left: threading.ExceptHookArgs) -> None:
    """The same about an error that a thread ended with."""
    if left.exc_type is not SystemExit:
        show_error(left.exc_type, left.exc_value, left.exc_traceback)
