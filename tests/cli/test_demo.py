"""`lemma demo`: GRPO makes the model right where more imitation does not, and a demo that was killed goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from lemma.cli import main
from lemma.core import faults
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.results import Report, make_report, read_report
from lemma.reports import demo_summary as demo
from lemma.reports.demo_summary import DemoScore, Styles, explanation, is_stepwise, samples, table
from tests.preloaded import Python

STAGES = ("sft", "grpo", "sft_longer")
# A demo that has all parts and learns nothing.
MINUTE = [
    *("--set", "stages.sft.steps=4", "--set", "stages.sft.checkpoint.every=2"),
    *("--set", "stages.sft.data.arithmetic.count=200", "--set", "stages.sft_longer.data.arithmetic.count=200"),
    *("--set", "stages.sft_longer.steps=2", "--set", "stages.grpo.data.arithmetic.count=50"),
    *("--set", "stages.grpo.steps=2", "--set", "stages.grpo.batch.problems=2"),
    *("--set", "stages.grpo.rollout.max_tokens=8"),
]  # fmt: skip
MINUTE_HELD_OUT = 12
# The demo with fewer steps, for every run of the tests.
SHORTER = [
    *("--set", "stages.sft.steps=600", "--set", "stages.grpo.steps=16"),
    *("--set", "stages.sft_longer.steps=5", "--set", "stages.sft_longer.data.arithmetic.count=200"),
]


def accuracy(run: Path, stage: str, name: str = "greedy") -> float:
    return read_report(run / "evaluations" / f"{stage}-{name}").summaries["held-out"].accuracy.value


def check_gain(run: Path, *settings: str) -> None:
    """GRPO adds 20 points or more of held-out greedy accuracy, and more SFT does not come near."""
    assert main(["demo", "--set", f"run.dir={run}", "--set", "run.tensorboard=false", *settings]) == 0
    before, after, longer = (accuracy(run, stage) for stage in STAGES)
    print(f"greedy: SFT {before:.1%}, GRPO {after:.1%}, more SFT {longer:.1%}")
    assert after >= before + 0.20
    assert after >= longer + 0.15
    assert accuracy(run, "grpo", "temperature-1") >= accuracy(run, "sft", "temperature-1") + 0.15


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_grpo_adds_twenty_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "HELD_OUT", 200)
    check_gain(tmp_path / "demo", *SHORTER)
    page, out = (tmp_path / "demo" / "results.md").read_text(), capsys.readouterr().out
    assert page in out
    assert f"| SFT, then GRPO | {100 * accuracy(tmp_path / 'demo', 'grpo'):.1f} (" in re.sub(" +", " ", page)


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(5))
def test_grpo_adds_twenty_points_whatever_the_seed(seed: int, tmp_path: Path) -> None:
    check_gain(tmp_path / "demo", "--set", f"run.seed={seed}")


# --- killed and started again ------------------------------------------------------------------------------------


def arguments(run: Path) -> list[str]:
    return ["demo", "--set", f"run.dir={run}", "--set", "run.tensorboard=false", *MINUTE]


DEMO = f"""
import sys
from lemma.cli import main
from lemma.reports import demo_summary
demo_summary.HELD_OUT = {MINUTE_HELD_OUT}
sys.exit(main())
"""


def what_counts(run: Path) -> dict[str, bytes | str]:
    """Everything that must not depend on how often a demo was stopped: all but timings and where the run stands."""
    page = " ".join(
        re.sub(r"\+?\s*(\d+\s+h\s+)?(\d+\s+min\s+)?\d+\s+s\b", "", (run / "results.md").read_text()).split()
    )
    files = [*run.glob("stages/*/final/model.safetensors"), *run.glob("evaluations/*/samples.jsonl")]
    assert len(files) == 3 + 6
    return {"page": page} | {str(path.relative_to(run)): path.read_bytes() for path in sorted(files)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small demo that nothing disturbed."""
    run = tmp_path_factory.mktemp("demo") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "HELD_OUT", MINUTE_HELD_OUT)
        assert main(arguments(run)) == 0
    return run


def test_a_demo_that_is_killed_goes_on_to_the_same_page(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "killed"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for fault in ("rl.before_update:2", "evaluation.before_results:4"):
        process = Python(["-c", DEMO, *arguments(killed)], env=os.environ | {"LEMMA_FAULT": fault}, **quiet)
        assert process.wait(500) == -signal.SIGKILL, fault
        assert not (killed / "results.md").exists()
    monkeypatch.setattr(demo, "HELD_OUT", MINUTE_HELD_OUT)
    assert main(arguments(killed)) == 0
    said = capsys.readouterr().out
    assert "sft: done already" in said and "grpo: done already" in said
    assert what_counts(killed) == what_counts(whole)


def test_a_finished_demo_shows_its_page_again_and_a_fresh_one_forgets_it(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "HELD_OUT", MINUTE_HELD_OUT)
    page = (whole / "results.md").read_text()
    assert main(arguments(whole)) == 0
    assert page in capsys.readouterr().out
    (whole / "results.md").unlink()
    shutil.rmtree(whole / "evaluations" / "grpo-greedy")
    assert main(arguments(whole)) == 0
    assert (whole / "results.md").read_text() == page
    monkeypatch.setattr(faults, "_visits", Counter())
    monkeypatch.setenv("LEMMA_FAULT", "stage.step_end:1:EIO")
    with pytest.raises(OSError):
        main([*arguments(whole), "--fresh"])
    assert not (whole / "results.md").exists() and not (whole / "evaluations").exists()


# --- what the page says --------------------------------------------------------------------------------------------

STEPS, LINE = "3 + 2 = 5 ; 5 - 4 = 1", "3 + 2 - 4 = 1"


def report(*answers: tuple[str, bool]) -> Report:
    """Problems answered in this way, rightly or not."""
    rows = [
        EvalRow("held-out", f"p{number}", 0, f"question {number}", "", f"{reasoning} </think>", "1", ["1"],
            "right" if right else "wrong", "", True, [], "stop", 9, reasoning, 1.1 if right else 0.1)
        for number, (reasoning, right) in enumerate(answers)
    ]  # fmt: skip
    return make_report({"name": "m"}, {"held-out": {"seed": 0, "ties": "average", "metric": "avg"}}, {"held-out": rows})


def measured() -> list[DemoScore]:
    sft = report((STEPS, True), (STEPS, True), (LINE, False), (LINE, False), (LINE, True))
    grpo = report((STEPS, True), (STEPS, True), (STEPS, True), (STEPS, True), (LINE, False))
    longer = report((STEPS, True), (STEPS, False), (LINE, False), (LINE, False), (LINE, True))
    times = {"sft": 100.0, "grpo": 30.4, "sft_longer": 61.0}
    found = {"sft": sft, "grpo": grpo, "sft_longer": longer}
    return [DemoScore(stage, found[stage], found[stage], times[stage]) for stage in STAGES]


def test_steps_that_are_written_down_are_seen() -> None:
    assert is_stepwise(STEPS) and not is_stepwise(LINE) and not is_stepwise(None)


def test_styles_by_hand() -> None:
    sft, grpo, _ = (Styles.of(one.sampled.rows["held-out"]) for one in measured())
    assert (sft.share, sft.right_stepwise, sft.right_terse) == pytest.approx((0.4, 1.0, 1 / 3))
    assert (grpo.share, grpo.right_stepwise, grpo.right_terse) == pytest.approx((0.8, 1.0, 0.0))
    assert Styles.of(report((LINE, True)).rows["held-out"]).right_stepwise is None


def test_the_explanation_gives_the_numbers_of_the_run() -> None:
    text = explanation(measured())
    # 3 of 5 right before, 4 of 5 after: the choice alone would give (0.8 - 0.4) * (1 - 1/3).
    for part in ("40% of the answers write steps down; of those 100% are right, of the others 33%.",
                 "After GRPO 80% write steps down, and 100% of those are right.",
                 "Of +20.0 points at temperature 1, +26.7 come from choosing that way", "and -6.7 from more slips.",
                 "GRPO changed accuracy by +20.0 points (95% interval ",
                 "in 30 s. More SFT, with new demonstrations and for 1 min 1 s, changed it by -20.0 points (95%",
                 "imitation keeps the mixture (40% "):  # fmt: skip
        assert part in text, part


def test_a_style_that_was_never_used_has_no_accuracy() -> None:
    _, grpo, longer = measured()
    never = report(*[(LINE, True)] * 5)
    text = explanation([DemoScore("sft", never, never, 1.0), grpo, longer])
    assert "of those none are right" in text and "every answer was written in the same way" in text


def test_the_table_and_the_samples() -> None:
    found = measured()
    lines = [re.sub(" +", " ", line) for line in table(found).splitlines()]
    assert lines[2] == "| SFT | 60.0 (14.7 to 94.7) | 60.0 (14.7 to 94.7) | 100.0 | 0.700 | 1 min 40 s |"
    assert lines[3].endswith("| 0.900 | + 30 s |") and lines[4].startswith("| SFT, then more SFT | 40.0 (")
    assert len({len(line) for line in table(found).splitlines()}) == 1
    shown = samples(found[0], found[1])
    assert shown.count("Q: ") == 3 and f"  SFT: {LINE} </think>   [wrong, it is 1]" in shown
