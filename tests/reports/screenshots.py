"""Write the pictures of the report in docs/: `make screenshots`, from the run of the demo, which is made if need be.

`python -m tests.reports.screenshots RUN agent` writes those of an agent's run instead.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lemma.cli import main

ROOT = Path(__file__).resolve().parents[2]
TO = ROOT / "docs" / "pictures"
RUN = ROOT / "runs" / "demo"
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 780}
# Name, view, screen, colours.
SHOTS = (
    ("report-overview", "overview", DESKTOP, "light"),
    ("report-curves", "curves", DESKTOP, "light"),
    ("report-evaluations", "evaluations", DESKTOP, "light"),
    ("report-completions", "completions", DESKTOP, "light"),
    ("report-time-dark", "time", DESKTOP, "dark"),
    ("report-curves-phone", "curves", PHONE, "light"),
    ("report-completions-dark-phone", "completions", PHONE, "dark"),
)

AGENT_SHOTS = (
    ("report-agent-curves", "curves", DESKTOP, "light"),
    ("report-agent-turns", "completions", DESKTOP, "light"),
)


def write(run: Path, to: Path, shots: Sequence[tuple[str, str, dict[str, int], str]] = SHOTS) -> None:
    from playwright.sync_api import sync_playwright

    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder) / "report.html"
        assert main(["report", str(run), "--to", str(report)]) == 0
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, view, screen, colours in shots:
            tab = browser.new_page(viewport=screen, color_scheme=colours)  # type: ignore[arg-type]
            tab.goto(f"{report.as_uri()}#{view}")
            tab.wait_for_selector("html[data-ready=yes]")
            if view == "completions":
                tab.select_option("form label:has-text('Step') select", index=3)
                tab.click("#list .row >> nth=4")
                tab.evaluate("scrollTo(0, 0)")
            tab.wait_for_timeout(500)
            tab.screenshot(path=to / f"{name}.png")
            tab.close()
        browser.close()


if __name__ == "__main__":
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else RUN
    if not (run / "recipe.yaml").is_file():
        assert main(["demo"]) == 0
    write(run, TO, AGENT_SHOTS if sys.argv[2:] == ["agent"] else SHOTS)
