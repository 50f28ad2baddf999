"""What the console says: lines that fit, rates that can be, evaluations in one line, and never a long silence."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest

from lemma.core.events import Awaited, Event, Measured, Progressed, Said, StageEnded, StageStarted
from lemma.reporting import bars
from lemma.reporting import console as console_module
from lemma.reporting.bars import progress_line
from lemma.reporting.console import Console, Pace, evaluated

NOTE = "reward 0.41, loss 0.0123, kl 0.002, entropy 0.31, grad_norm 0.7, lr 1e-06"


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lemma.reporting.console.time.monotonic", clock)
    return clock


def shown(events: list[Event]) -> list[str]:
    stream = io.StringIO()
    console = Console(stream)
    for event in events:
        console(event)
    console.close(False)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_progress_line_fits_and_cuts_numbers_first(clock: Clock, width: int) -> None:
    pace = Pace(0, 2000)
    for step in range(1, 5):
        clock.now += 2
        pace.reach(400 + step, 2000)
    front, bar, rest = progress_line("grpo", pace, NOTE, width)
    assert len(front + bar + rest) <= width
    assert front == "grpo " and " 404/2,000  " in rest and "left" in rest
    assert ("reward 0.41" in rest) is (width >= 80) and ("grad_norm" in rest) is (width >= 140)


def test_time_left_by_the_share_of_the_work_not_by_finished_samples(clock: Clock) -> None:
    """A thousand samples of one length: none is finished for long, then all are."""
    pace = Pace(0, 1000)
    for second in range(1, 91):
        clock.now += 1
        pace.reach(0, 1000, second / 100)
    assert pace.left == "10 s left" and pace.speed == ""


def test_no_rate_of_what_was_there_already(clock: Clock) -> None:
    pace = Pace(0, 10_000_000)
    for done in (1_000_000, 5_000_000, 9_000_000):
        clock.now += 1e-6
        pace.reach(done, 10_000_000)
    assert str(pace) == ""
    clock.now += 60
    pace.reach(9_000_600, 10_000_000)
    assert "/s" not in str(pace), "67,000 a second are a file that was read, not work that anybody watches"


def evaluation(*benchmarks: str) -> Measured:
    values: dict[str, float] = {}
    for name in ([""] if len(benchmarks) > 1 else []) + [f"{one}/" for one in benchmarks]:
        own = {"answer_accuracy": 0.412, "answer_accuracy_low": 0.385, "answer_accuracy_high": 0.44}
        own |= {"format_accuracy": 0.98, "lenient_accuracy": 0.42, "truncated": 0.03, "tokens": 211.0, "pass@2": 0.6}
        values |= {f"evaluation/{name}{key}": value for key, value in own.items()}
    return Measured("grpo", 50, "eval", values)


def test_an_evaluation_takes_one_line() -> None:
    line = "grpo: evaluation at step 50: gsm8k 41.2% (38.5 to 44.0); format 98%, cut off 3%"
    assert evaluated(evaluation("gsm8k")) == line
    assert shown([StageStarted("grpo", 0, 9), Progressed("evaluation", 5, 5), evaluation("gsm8k")])[1:] == [line]
    event = evaluation("gsm8k")
    event = replace(event, values={**event.values, "evaluation/gsm8k/lenient_accuracy": 0.6})
    assert evaluated(event) == line + ", lenient 60%"
    many = evaluated(evaluation(*(f"set{n}" for n in range(6))))
    assert many.startswith("grpo: evaluation at step 50: mean 41.2% (38.5 to 44.0), set0 41.2%")
    assert "set3" in many and "set4" not in many and "and 2 more" in many


def test_a_stage_ends_with_what_it_reached() -> None:
    summary = {"steps": 9, "problems": 100, "seconds": 200.4, "best answer_accuracy": 0.412, "model": "runs/a/final"}
    events = [
        StageStarted("grpo", 0, 9),
        Measured("grpo", 9, "train", {"loss": 0.25, "reward/mean": 0.7, "lr": 1e-6}),
        StageEnded("grpo", 9, summary),
    ]
    assert shown(events)[-1] == (
        "grpo: ended at step 9 after 3 min 20 s: reward 0.7, loss 0.25, problems 100, best answer_accuracy 0.412; "
        "the model is in runs/a/final"
    )


def test_the_time_of_a_resumed_stage_is_that_of_its_last_session() -> None:
    end = StageEnded("sft", 3, {"seconds": 67.0}, resumed=True)
    assert shown([end]) == ["sft: ended at step 3 after 1 min 7 s in this session"]


def test_where_the_model_is_is_told_once() -> None:
    end, told = StageEnded("sft", 2, {"model": "runs/a/final"}), Said("the model is in runs/a/final")
    assert shown([end, told]) == ["sft: ended at step 2; the model is in runs/a/final"]
    assert shown([Said("sft: done already"), told]) == ["sft: done already", "the model is in runs/a/final"]
    assert shown([end, Said("the model is in runs/b/final")])[1:] == ["the model is in runs/b/final"]


def test_what_was_learnt_is_told_before_what_there_was_to_learn() -> None:
    summary = {"tokens": 900, "examples": 30, "steps": 2, "learnt_tokens": 240, "learnt_examples": 8}
    assert shown([StageEnded("sft", 2, summary)]) == [
        "sft: ended at step 2: tokens 240 (900 in the data), examples 8 (30 in the data)"
    ]


def wait_for(ready: Callable[[], bool]) -> bool:
    import time

    for _ in range(500):
        if ready():
            return True
        time.sleep(0.01)
    return False


def test_a_pipe_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "LONGEST_SILENCE", 0.2)
    stream = io.StringIO()
    console = Console(stream)
    console(StageStarted("grpo", 3, 9))
    assert wait_for(lambda: "grpo: 3/9, running for " in stream.getvalue())
    console.close(False)


def test_a_pace_leaves_out_what_is_no_step(clock: Clock) -> None:
    """44 steps of 2 s with an evaluation of five minutes every other step, as a console sees them."""
    pace = Pace(0, 44)
    for step in range(1, 21):
        clock.now += 2
        if step % 2 == 0:
            pace.pause()
            clock.now += 300
            pace.go_on()
        pace.reach(step, 44)
    assert str(pace) == "2.0 s each, 48 s left"
    pace.pause()
    clock.now += 100
    assert str(pace) == "2.0 s each, 48 s left"
    pace.reach(21, 44)
    assert pace.per_second > 0.5


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_gives_the_pace_of_steps_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    console = Console(stream)
    console(StageStarted("sft", 0, 8))
    for step in range(1, 5):
        clock.now += 10
        console(Awaited("sft", "evaluating (benchmarks)"))
        clock.now += 1000
        console(Awaited("sft"))
        console(Progressed("sft", step, 8))
    view = console._view
    pace = view._bars["sft"][1] if isinstance(view, bars.Bars) else view._paces["sft"]
    assert str(pace) == "10.0 s each, 40 s left"
    console.close(False)


def test_what_takes_longer_than_a_moment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "SECONDS_TO_WAIT", 0.1)
    stream = io.StringIO()
    console = Console(stream)
    console(Awaited("sft", "loading the model"))
    assert wait_for(lambda: stream.getvalue() == "sft: loading the model\n")
    console(Awaited("sft"))
    console(StageStarted("sft", 0, 8))
    monkeypatch.setattr(console_module, "LONGEST_SILENCE", 0.2)
    console(Awaited("sft", "starting vLLM"))
    assert wait_for(lambda: "sft: 0/8, starting vLLM\nsft: 0/8, starting vLLM for " in stream.getvalue())
    console(StageEnded("sft", 8))
    assert wait_for(lambda: stream.getvalue().endswith("sft: ended at step 8\n"))
    console.close(False)


def test_a_terminal_shows_what_is_waited_for_and_since_when() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    console = Console(stream)
    console(Awaited("sft", "loading the model"))
    assert wait_for(lambda: "sft: loading the model, 0 s" in stream.getvalue())
    console(Awaited("sft"))
    console(StageStarted("sft", 0, 8))
    console(Awaited("sft", "starting vLLM"))
    assert wait_for(lambda: "starting vLLM" in stream.getvalue() and "0/8" in stream.getvalue())
    console(StageEnded("sft", 8))
    console.close(False)
