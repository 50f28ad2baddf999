"""A part of a split, in the notation of the `datasets` library: `train[:50%]`, `train[1000:]`, `train[-10%:]`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, TypeVar

T = TypeVar("T")
_BORDER = r"(?P<{0}>-?\d+)(?P<{0}_percent>%)?"
_PART = re.compile(rf"(?P<split>[^\[\]]+)\[(?:{_BORDER.format('first')})?:(?:{_BORDER.format('last')})?\]")


class Border(NamedTuple):
    """Where a part begins or ends: a row number, or a percentage of all rows; negative counts from the end."""

    number: int
    is_percent: bool

    def among(self, rows: int) -> int:
        place = round(self.number * rows / 100) if self.is_percent else self.number
        return min(max(place + rows if self.number < 0 else place, 0), rows)


class Part(NamedTuple):
    """A split, and which of its rows."""

    split: str
    first: Border | None = None
    last: Border | None = None

    def of(self, rows: Iterable[T]) -> Iterable[T]:
        """The rows of this part. They are counted first if a border depends on how many there are."""
        borders = [border for border in (self.first, self.last) if border is not None]
        if any(border.is_percent or border.number < 0 for border in borders):
            rows = list(rows)
            first = self.first.among(len(rows)) if self.first else 0
            return rows[first : self.last.among(len(rows)) if self.last else len(rows)]
        return islice(rows, self.first.number if self.first else 0, self.last.number if self.last else None)


def part_of(split: str) -> Part:
    """Parse `train` or `train[:50%]`. ValueError if it is neither."""
    match = _PART.fullmatch(split)
    if match is None and ("[" in split or "]" in split):
        raise ValueError(f"'{split}' is not a part of a split; write for example `train[:50%]` or `train[1000:2000]`")
    if match is None:
        return Part(split)
    borders = [Border(int(match[name]), bool(match[f"{name}_percent"])) if match[name] else None
               for name in ("first", "last")]  # fmt: skip
    if any(border.is_percent and abs(border.number) > 100 for border in borders if border):
        raise ValueError(f"'{split}' asks for more than 100% of the rows")
    return Part(match["split"], *borders)
