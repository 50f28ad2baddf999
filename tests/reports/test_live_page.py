"""The live page: who is answered, what a browser sees of a run that goes on, and of one that dies."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lemma.reports.live_page import Watch
from lemma.reports.run_reader import open_runs
from tests.reports.conftest import Page
from tests.reports.made_runs import long_run, measure, sample, small_run, write_journal


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    run = small_run(tmp_path / "run", steps=3)
    watch = Watch(open_runs([run]), ["words"]).start()
    yield run, watch.address
    watch.close()


def ask(address: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data, headers)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_only_whoever_has_the_token_is_answered(served: tuple[Path, str]) -> None:
    _, address = served
    base = address.rsplit("/", 2)[0]
    assert address.startswith("http://127.0.0.1:")
    assert ask(address)[0] == 200 and ask(address + "data", {})[0] == 200
    for wrong in (
        base + "/",
        base + "/data",
        base + "/x/",
        base + "/x/data",
        address + "../data",
        address + "etc/passwd",
    ):
        assert ask(wrong)[0] == 403, wrong
        assert ask(wrong, {})[0] == 403, wrong
    assert ask(address, Host="evil.example:80")[0] == 403, "a name that was pointed at this machine"


def test_samples_come_by_their_names_only(served: tuple[Path, str]) -> None:
    _, address = served
    code, body = ask(address + "samples", {"run": 0, "key": "grpo/2"})
    assert code == 200 and len(json.loads(body)["samples"]) == 8
    for wrong in ({"run": 0, "key": "../../etc/passwd"}, {"run": 5, "key": "grpo/2"}, {"key": 1}, [], "x"):
        assert ask(address + "samples", wrong)[0] == 404, wrong


def test_nothing_is_written(served: tuple[Path, str]) -> None:
    run, address = served
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    ask(address), ask(address + "data", {}), ask(address + "samples", {"run": 0, "key": "grpo/1"})
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_page_follows_and_tells_when_the_server_is_gone(tmp_path: Path, page: Page) -> None:
    run = small_run(tmp_path / "run", steps=3)
    watch = Watch(open_runs([run]), ["words"]).start()
    tab = page.open(watch.address)
    assert tab.locator(".stages").inner_text().count("3 of 3 steps") == 1
    measure(run, [4, 5], total=9)
    tab.wait_for_selector(".stages:has-text('5 of 9 steps')")
    assert page.troubles == []
    watch.close()
    tab.wait_for_selector("#connection:has-text('does not answer')")


def test_completions_of_a_step_in_progress_are_read_again_and_newer_ones_offered(tmp_path: Path, page: Page) -> None:
    run = small_run(tmp_path / "run", steps=3)
    notes = run / "stages" / "grpo" / "notes" / "step-000003.npz"
    learnt = notes.read_bytes()
    notes.unlink()
    watch = Watch(open_runs([run]), ["words"]).start()
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tab = page.open(watch.address + "#completions")
        offered = tab.locator("#detail .between option")
        assert "ratio to the old policy" not in offered.all_inner_texts(), "nothing was learnt from this step yet"
        notes.write_bytes(learnt)
        for arrow, step in (("Previous step", 2), ("Next step", 3)):
            tab.click(f"[aria-label='{arrow}']")
            tab.wait_for_selector(f"#detail h2:has-text('step {step}')")
        assert "ratio to the old policy" in offered.all_inner_texts()
        write_journal(run, 4, [sample(4, 9, 0, "4 + 4 = 8")])
        tab.click("text=Newest: step 4")
        tab.wait_for_selector("#detail h2:has-text('step 4')")
        assert "4 + 4 = 8" in tab.locator("#detail .completion").inner_text()
    watch.close()
    assert page.troubles == []


def test_a_long_run_is_read_quickly(tmp_path: Path) -> None:
    """5,000 steps and 5 million tokens: the first look, a look at one step, and a look at what is new."""
    run = long_run(tmp_path / "run", steps=5000, samples=16, tokens=64)
    watch = Watch(open_runs([run]), ["words"]).start()
    try:
        begin = time.process_time()
        whole = json.loads(ask(watch.address + "data", {})[1])["runs"][0]
        first = time.process_time() - begin
        assert len(whole["curves"]["grpo/train"]["steps"]) == 5000
        begin = time.process_time()
        ask(watch.address + "samples", {"run": 0, "key": "grpo/4321"})
        seen = [{"generation": whole["generation"], "counts": {"grpo/train": 5000}}]
        again = ask(watch.address + "data", {"seen": seen})[1]
        later = time.process_time() - begin
    finally:
        watch.close()
    assert first < 5 and later < 1, (first, later)
    assert len(again) < 600_000


RECIPE: dict[str, Any] = {
    "model": {"tiny": {"hidden": 16, "layers": 1, "feed_forward": 16, "heads": 2, "kv_heads": 1, "context": 96}},
    "format": {"name": "r1_zero", "preamble": False},
    "stages": {
        "grpo": {
            "kind": "rl", "steps": 4000, "rewards": ["format"], "algorithm": {"name": "grpo", "group_size": 2},
            "data": {"arithmetic": {"count": 40, "operations": 1}}, "rollout": {"max_tokens": 8},
            "batch": {"problems": 2, "token_budget": 256}, "checkpoint": {"every": 1000},
        }
    },
}  # fmt: skip


@pytest.mark.slow(seconds=30)
def test_the_page_of_a_real_training_run_follows_it_and_sees_it_die(tmp_path: Path, page: Page) -> None:
    run = {"dir": str(tmp_path / "run"), "device": "cpu", "threads": 1, "tensorboard": False}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"run": run, **RECIPE}))
    command = [sys.executable, "-m", "lemma", "train", str(tmp_path / "recipe.yaml"), "--watch"]
    log = tmp_path / "out"
    with open(log, "w") as out:
        training = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        address = _wait_for_address(log, training)
        tab = page.open(address)
        tab.wait_for_selector(".badge.running")
        tab.click("#tab-curves")
        tab.wait_for_selector(".chart[data-name='reward/mean']")
        steps = "document.querySelector(\".chart[data-name='reward/mean']\").chart.series[0].x.length"
        before = tab.evaluate(steps)
        for _ in range(100):
            tab.wait_for_timeout(100)
            if tab.evaluate(steps) > before:
                break
        assert tab.evaluate(steps) > before, "the curve grows by itself"
        shown = tab.evaluate(
            "(() => { const s = document.querySelector(\".chart[data-name='length/mean']\").chart.series[0];"
            " return s.x.map((x, i) => [x, s.y[i]]); })()"
        )
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        written = {row["step"]: row["length/mean"] for row in rows}
        assert shown and all(abs(written[step] - value) < 1e-3 for step, value in shown)
        training.send_signal(signal.SIGKILL)
        training.wait()
        tab.wait_for_selector("header .badge.dead")
        assert page.troubles == []
    finally:
        training.kill()
        training.wait()


def _wait_for_address(log: Path, training: subprocess.Popen[bytes]) -> str:
    for _ in range(600):
        address = next((line for line in log.read_text().splitlines() if line.startswith("http://")), None)
        if address:
            return address
        assert training.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())
