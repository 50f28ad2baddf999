"""The screens of `train` and `eval` are those of the golden files; `make screens` makes them anew."""

from __future__ import annotations

import pytest

from tests.reporting.screens import SCREENS, WIDTHS, golden


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_as_it_was(name: str, width: int) -> None:
    shown = SCREENS[name](width)
    assert max(map(len, shown.splitlines())) <= width
    assert shown == golden(name, width).read_text(encoding="utf-8")
