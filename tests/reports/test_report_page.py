"""The report in a real browser: every view, values of curves, samples of journals, hostile text, accessibility."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from lemma.cli import main
from lemma.runs.card_contamination import write_record
from tests.reports.conftest import Page
from tests.reports.made_runs import (
    evaluate,
    log_ratio,
    long_run,
    measure,
    metrics_row,
    recipe,
    sample,
    small_run,
    write_byte_tokenizer,
    write_journal,
)

VIEWS = ("overview", "curves", "time", "evaluations", "completions")
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1, "has_touch": True}
DESKTOP = {"viewport": {"width": 1280, "height": 900}}


def write(tmp_path: Path, *runs: Path, size: float = 10) -> str:
    to = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--to", str(to), "--size", str(size)]) == 0
    return to.as_uri()


def series(tab: Any, name: str) -> list[dict[str, Any]]:
    """The points of a chart as the page has them."""
    chart = "document.querySelector(`.chart[data-name='${name}']`).chart"
    return tab.evaluate(f"name => {chart}.series.map(({{name, x, y}}) => ({{name, x, y}}))", name)


@pytest.mark.parametrize(
    "settings", [DESKTOP, PHONE, DESKTOP | {"color_scheme": "dark"}], ids=["desktop", "phone", "dark"]
)
def test_every_view_opens_without_an_error_and_is_accessible(
    settings: dict[str, Any], small: Path, tmp_path: Path, chromium: Any
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = Page(chromium, **settings)
    tab = page.open(write(tmp_path, small))
    found = []
    for view in VIEWS:
        tab.click(f"#tab-{view}")
        assert tab.locator("main").inner_text().strip(), view
        tab.wait_for_timeout(150)
        for one in axe.run(tab).response["violations"]:
            if one["impact"] in ("serious", "critical"):
                found.append((view, one["id"], [node["html"][:120] for node in one["nodes"]][:3]))
        wide = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{view} is wider than the screen"
    page.close()
    assert found == []
    assert page.troubles == []
    assert [one for one in page.asked if not one.startswith("file:")] == [], "the page asks nobody for anything"


def test_curves_have_the_values_of_the_metrics(small: Path, tmp_path: Path, page: Page) -> None:
    tab = page.open(write(tmp_path, small) + "#curves")
    rows = [json.loads(line) for line in (small / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward/mean", "entropy/sampled", "grad_norm"):
        (found,) = series(tab, name)
        assert found["x"] == [row["step"] for row in rows]
        assert found["y"] == pytest.approx([row[name] for row in rows], rel=1e-5)
    (odd,) = series(tab, "odd/number")
    assert odd["y"][2] is None and odd["y"][3] == 4, "what is no number is a gap"


def test_smoothing_log_axis_zoom_and_reading_values(small: Path, tmp_path: Path, page: Page) -> None:
    tab = page.open(write(tmp_path, small) + "#curves")
    chart = tab.locator(".chart[data-name='reward/mean']")
    line = chart.locator("path.line")
    plain = line.get_attribute("d")
    tab.locator("#smoothing").fill("0.9")
    assert line.get_attribute("d") != plain and chart.locator("path.raw").count() == 1
    tab.locator("#smoothing").fill("0")
    assert line.get_attribute("d") == plain
    norm = tab.locator(".chart[data-name='grad_norm']")
    norm.scroll_into_view_if_needed()
    before = norm.locator(".axis text").all_text_contents()
    tab.check("#log")
    after = norm.locator(".axis text").all_text_contents()
    assert "0.01" in after and "0.01" not in before
    tab.uncheck("#log")

    chart.scroll_into_view_if_needed()
    chart.locator("svg").focus()
    tab.keyboard.press("Home")
    assert "step 1" in chart.locator(".readout").inner_text()
    tab.keyboard.press("ArrowRight")
    assert f"{metrics_row(2)['reward/mean']:.4g}" in chart.locator(".readout").inner_text()
    tab.keyboard.press("Escape")

    box = chart.locator("svg").bounding_box()
    assert box is not None
    tab.mouse.move(box["x"] + 120, box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 240, box["y"] + 60, steps=4)
    tab.mouse.up()
    assert line.get_attribute("d") != plain, "the range is zoomed"
    tab.click("#unzoom")
    assert line.get_attribute("d") == plain


def test_two_runs_lie_over_each_other(small: Path, tmp_path: Path, page: Page) -> None:
    other = small_run(tmp_path / "longer", steps=9)
    tab = page.open(write(tmp_path, small, other))
    assert "stages.grpo.steps" in tab.locator("main").inner_text(), "the option in which the recipes differ"
    steps = tab.locator("section:has-text('Side by side') tbody tr td:nth-child(4)").all_inner_texts()
    assert steps == ["6", "9"]
    tab.click("#tab-curves")
    found = series(tab, "reward/mean")
    assert [(one["name"], len(one["x"])) for one in found] == [("small", 6), ("longer", 9)]
    tab.uncheck("fieldset.runs label:first-of-type input")
    assert [one["name"] for one in series(tab, "reward/mean")] == ["longer"]


def test_what_the_data_repeat_of_the_benchmarks_is_told(tmp_path: Path, page: Page) -> None:
    run = small_run(tmp_path / "run", steps=1)
    found = {"words": "3 of 4 rows repeat a problem", "flagged": 3, "rows": 4, "benchmarks": ["<b>asked</b>: 2 of 3"]}
    write_record(run, "grpo", {"benchmarks": ["asked"], "stages": {"grpo": found}})
    text = page.open(write(tmp_path, run) + "#evaluations").locator("main").inner_text()
    assert "No evaluation yet" in text and "Compared with asked." in text
    assert "3 of 4 rows repeat a problem; <b>asked</b>: 2 of 3" in text
    assert page.troubles == []


def test_the_overview_tells_state_warnings_and_recipe(small: Path, tmp_path: Path, page: Page) -> None:
    text = page.open(write(tmp_path, small)).locator("main").inner_text()
    assert "6 of 6 steps" in text and "grpo" in text
    assert "90% of the completions are cut off" in text and "step 2" in text
    assert "built-in arithmetic" in text


def test_the_overview_has_the_latest_evaluation_of_each_stage(small: Path, tmp_path: Path, page: Page) -> None:
    run = Path(shutil.copytree(small, tmp_path / "run"))
    evaluate(run / "evaluations" / "grpo" / "step-000000", [False] * 4)
    evaluate(run / "evaluations" / "grpo" / "step-000006", [False] * 1 + [True] * 3)
    tab = page.open(write(tmp_path, run))
    rows = tab.locator("[aria-label='Latest evaluations'] tbody tr")
    assert rows.count() == 1 and "grpo, step 6" in rows.inner_text() and "75.0%" in rows.inner_text()
    above, below = rows.bounding_box(), tab.locator(".attention").bounding_box()
    assert above and below and below["y"] - above["y"] - above["height"] >= 12, "the next heading stands apart"


def test_completions_open_on_a_group_that_teaches_something(tmp_path: Path, page: Page) -> None:
    recipe(tmp_path / "run", steps=1)
    measure(tmp_path / "run", [1], total=1)
    dead = [sample(1, g, n, "1 + 1 = 2", verdict="right", reward=1.0) for g in range(30) for n in range(4)]
    write_journal(tmp_path / "run", 1, [*dead, *(sample(1, 30, n, "1 + 1 = 2") for n in range(4))])
    tab = page.open(write(tmp_path, tmp_path / "run") + "#completions")
    tab.wait_for_selector("#detail h2")
    assert "group 30, sample 0" in tab.locator("#detail h2").inner_text()
    assert tab.locator("#list").evaluate("list => list.scrollTop") > 0, "its row is in sight"


def test_time_is_split_and_what_held_steps_back_is_named(small: Path, tmp_path: Path, page: Page) -> None:
    tab = page.open(write(tmp_path, small) + "#time")
    text = tab.locator("main").inner_text()
    assert "generate" in text and "60.0%" in text, "1.2 of 2 seconds"
    assert "bottleneck" in text.lower()
    memory = tab.locator(".chart[data-name='peak_memory_gib']")
    memory.scroll_into_view_if_needed()
    assert "plan of an update" in (memory.locator("svg").text_content() or ""), "memory against the plan"


def test_completions_are_filtered_searched_and_shown_token_by_token(small: Path, tmp_path: Path, page: Page) -> None:
    tab = page.open(write(tmp_path, small) + "#completions")
    assert "8 completions, 4 right" in tab.locator("#found").inner_text()
    tab.select_option("form label:has-text('Verdict') select", "wrong")
    tab.wait_for_selector("#found:has-text('4 completions, 0 right')")
    tab.select_option("form label:has-text('Verdict') select", "")
    tab.fill("#search", "4 + 1 = 5")
    tab.click("#everywhere")
    tab.wait_for_selector("#found:has-text('In all steps')")
    shown = tab.locator("#detail .completion").inner_text()
    assert shown.startswith("4 + 1 = 5 ; 0 * 2 = 0 </think>")
    assert "grpo, step 4" in tab.locator("#detail h2").inner_text()
    assert "gold" in tab.locator("#detail .facts").inner_text()
    tokens = tab.locator("#detail .token")
    assert tokens.count() == len(sample(4, 9, 0, "4 + 1 = 5 ; 0 * 2 = 0 </think>").ids)
    first, last = (tokens.nth(i).get_attribute("title") or "" for i in (0, tokens.count() - 1))
    assert "log-probability -0.01" in first and f"{100 * math.exp(-4):.1f}%" in last

    tab.click("#detail h2")
    tab.keyboard.press("j")
    assert "sample 1" in tab.locator("#detail h2").inner_text()
    tab.click("text=How this problem's answers changed")
    tab.wait_for_selector("#history table")
    assert "grpo, step" in tab.locator("#history").inner_text()


def test_tokens_are_coloured_by_advantage_and_ratio(small: Path, tmp_path: Path, page: Page) -> None:
    tab = page.open(write(tmp_path, small) + "#completions")
    tokens = tab.locator("#detail .token")

    def pulls() -> list[float]:
        found = tokens.evaluate_all("all => all.map((one) => one.style.getPropertyValue('--pull'))")
        return [float(one) for one in found]

    tab.select_option("#detail .between select", "ratio")
    expected = [log_ratio(place) for place in range(tokens.count())]
    full = math.log(1.5)
    assert pulls() == pytest.approx([math.copysign(math.sqrt(abs(x) / full), x) for x in expected], abs=5e-3)
    kinds = tokens.evaluate_all("all => all.map((one) => one.dataset.by)")
    assert kinds == ["loss" if x < 0 else "gain" for x in expected]
    title = tokens.nth(4).get_attribute("title") or ""
    assert f"ratio to the old policy {math.exp(log_ratio(4)):.3f}" in title
    assert f"ratio to the engine {math.exp(0.01):.3f}" in title and "advantage 1" in title
    tab.select_option("#detail .between select", "advantage")
    assert pulls() == [1.0] * tokens.count() and "1; reward 0.5 above" in tab.locator("#detail .facts").inner_text()

    tab.select_option("#detail .between select", "engine")
    tab.click("#detail h2")
    for _ in range(3):
        tab.keyboard.press("j")
    assert "sample 3" in tab.locator("#detail h2").inner_text()
    assert "No update was computed" not in tab.locator("#detail").inner_text(), "the old policy's word is known of it"
    tab.select_option("#detail .between select", "ratio")
    assert "No update was computed on this sample" in tab.locator("#detail").inner_text()
    assert pulls() == [0.0] * tokens.count()
    assert page.troubles == []


def test_a_step_without_notes_offers_no_ratio(tmp_path: Path, page: Page) -> None:
    run = small_run(tmp_path / "run", steps=2)
    for path in (run / "stages" / "grpo" / "notes").iterdir():
        path.unlink() if "000001" in path.name else path.write_bytes(b"torn")
    tab = page.open(write(tmp_path, run) + "#completions")
    offered = tab.locator("#detail .between option").all_inner_texts()
    assert offered == ["log-probability", "advantage", "nothing"]
    assert tab.locator("#detail .token").count() and page.troubles == []


def test_many_runs_with_long_names_fit_any_screen(small: Path, tmp_path: Path, chromium: Any) -> None:
    runs = []
    for number in range(10):
        run = tmp_path / f"{number}-{'a-very-long-name-of-a-run-' * 4}"
        shutil.copytree(small, run)
        runs.append(run)
    address = write(tmp_path, *runs)
    for settings in (DESKTOP, PHONE):
        page = Page(chromium, **settings)
        tab = page.open(address)
        for view in VIEWS:
            tab.click(f"#tab-{view}")
            wide = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{view} is wider than the screen"
        tab.click("#tab-curves")
        assert len(series(tab, "reward/mean")) == 10
        high = tab.evaluate("document.querySelector('header').offsetHeight")
        page.close()
        assert high <= 120 and page.troubles == []


def test_turns_of_an_agent_and_a_teachers_beginning_are_told_apart(tmp_path: Path, page: Page) -> None:
    run = tmp_path / "agent"
    recipe(run, steps=1)
    measure(run, [1], total=1)
    whole = sample(1, 0, 0, "3 + 4 = 7 ; 7 * 2 = 14", given=4)
    first, second = sample(1, 1, 0, "3 + 4"), sample(1, 1, 0, "= 7 </think>")
    first.turns[0].heard = "the tool says <b>7</b>"
    first.turns.append(second.turns[0])
    write_journal(run, 1, [whole, first])
    tab = page.open(write(tmp_path, run) + "#completions")
    parts = tab.locator("#detail .part")
    assert parts.evaluate_all("all => all.map((one) => one.className)") == ["part given", "part sampled"]
    assert "given by a teacher" in parts.first.inner_text() and "3 + 4 =" in parts.first.inner_text()
    assert parts.nth(1).locator(".token").count() == len(whole.ids) - 4
    tab.click("#detail h2")
    tab.keyboard.press("j")
    kinds = parts.evaluate_all("all => all.map((one) => one.className)")
    assert kinds == ["part sampled", "part observation", "part sampled"]
    assert "the tool says <b>7</b>" in parts.nth(1).inner_text()
    assert page.troubles == []


HOSTILE = {
    "script": "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'>",
    "end of the block": "</script></template><svg onload='window.broken = 3'>",
    "turned around": "right \u202e left \u2066 and \u05e9\u05dc\u05d5\u05dd",
    "control": "bell \x07 null \x00 escape \x1b[31m del \x7f",
    "many bytes": "a face \U0001f600, a flag \U0001f1eb\U0001f1f7 and a mark e\u0301",
    "template": "{{data}} ${1+1} `x`",
    "long": "very long " * 100_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_completions_are_text(kind: str, tmp_path: Path, page: Page) -> None:
    text = HOSTILE[kind]
    run = tmp_path / "hostile"
    recipe(run, steps=1)
    measure(run, [1], {1: f"it said {text[:200]}"}, 1)
    ids = write_byte_tokenizer(run).encode(text).ids
    hostile = {"answer": text[:300], "reason": text[:300], "problem_id": text[:80], "gold": (text[:300],)}
    write_journal(run, 1, [sample(1, 0, 0, ids, text=text, **hostile)])
    tab = page.open(write(tmp_path, run))
    for view in VIEWS:
        tab.click(f"#tab-{view}")
    tab.wait_for_selector("#detail .facts")
    assert tab.evaluate("window.broken") is None
    assert page.troubles == []
    shown = tab.locator("#detail .completion").text_content()
    assert shown is not None and shown.startswith(text[:5])
    if kind == "control":
        assert "\u2407" in shown and "\x1b" not in shown
    elif kind == "turned around":
        assert "U+202E" in shown and "\u202e" not in shown and "\u05e9\u05dc\u05d5\u05dd" in shown
    elif kind == "long":
        assert "characters are not in this report" in shown and len(shown) < 30_000
    else:
        assert shown == text


def test_a_long_run_fits_and_opens_quickly(tmp_path: Path, page: Page) -> None:
    run = long_run(tmp_path / "long", steps=300, samples=64, tokens=40)
    address = write(tmp_path, run, size=2)
    assert (tmp_path / "report.html").stat().st_size <= 2_000_000
    tab = page.open(address)
    opened = tab.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart")
    assert opened < 5000
    tab.click("#tab-curves")
    (found,) = series(tab, "reward/mean")
    assert len(found["x"]) == 300, "the numbers of every step"
    tab.click("#tab-completions")
    steps = tab.locator("form label:has-text('Step') option").all_inner_texts()
    assert steps[0] == "1" and steps[-1] == "300" and 2 < len(steps) < 300, "samples of some steps, from first to last"
    assert page.troubles == []
