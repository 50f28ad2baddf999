"""A real browser for the tests of pages: the system's Chromium, or the one that `make` could install."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reports.made_runs import small_run

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Not for the session: as long as it is there, an event loop runs, and no other test could start one."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs a browser: playwright is not installed")
    os.environ.setdefault("PLAYWRIGHT_BROWSERS_PATH", str(Path(sys.prefix) / "browsers"))
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            # Tests run as root in containers, where Chromium's own sandbox does not start.
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"needs a browser: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


class Page:
    """A tab that remembers what went wrong in it."""

    def __init__(self, browser: Any, **settings: Any):
        self._context = browser.new_context(**settings)
        self.tab = self._context.new_page()
        self.tab.set_default_timeout(20_000)
        self.troubles: list[str] = []
        self.asked: list[str] = []
        self.tab.on(
            "console", lambda message: message.type in ("error", "warning") and self.troubles.append(message.text)
        )
        self.tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))

    def open(self, address: str) -> Any:
        self.tab.goto(address)
        self.tab.wait_for_selector("html[data-ready=yes]")
        return self.tab

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    page = Page(chromium)
    yield page
    page.close()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small")
