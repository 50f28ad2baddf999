"""Text that somebody else wrote, on a terminal: what a terminal would obey, or what hides how a line reads, is shown by
its number."""

from __future__ import annotations

from collections.abc import Iterable
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
