"""The loggers of a run: what they write, that a restart does not double curves, and that none of them ends a run."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lemma.core.errors import UserError
from lemma.core.events import Event, Measured, Progressed, Said, StageEnded, StageStarted
from lemma.reporting import console as console_module
from lemma.reporting import make_sink
from lemma.reporting.console import Console, Pace, duration, headline, number
from lemma.reporting.loggers import Loggers
from lemma.runs.run_folder import refuse_links
from tests import preloaded


def row(step: int, loss: float, stage: str = "sft", axis: str = "train") -> Measured:
    return Measured(stage, step, axis, {"loss": loss, "lr": 1e-5}, {"seconds": 0.5})  # type: ignore[arg-type]


def a_run(steps: int = 3) -> list[Event]:
    return [
        Said("a sentence [with brackets]"),
        StageStarted("sft", 0, steps),
        *(
            event
            for n in range(1, steps + 1)
            for event in (row(n, 2.0 / n), Progressed("sft", n, steps, f"loss {2 / n}"))
        ),
        row(steps, 0.25, axis="eval"),
        Said("something odd", "warning"),
        StageEnded("sft", steps, {"best": 0.25}),
    ]


# --- words


@pytest.mark.parametrize(
    ("value", "words"),
    [(3, "3"), (3.0, "3"), (1e-5, "1e-05"), (0.123456, "0.1235"), (12345.6, "12,346"), (float("nan"), "nan")],
)
def test_numbers_have_four_digits(value: float, words: str) -> None:
    assert number(value) == words


def test_durations() -> None:
    assert [duration(s) for s in (8.2, 200, 7500)] == ["8 s", "3 min 20 s", "2 h 5 min"]


def test_pace_counts_only_what_this_process_did(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 109.0, 111.0])
    monkeypatch.setattr("lemma.reporting.console.time.monotonic", lambda: next(now))
    pace = Pace(40, 100)
    assert str(pace) == ""
    pace.reach(44, 100)
    pace.reach(48, 100)
    assert pace.per_second == 2.0
    assert str(pace) == "2/s, 26 s left"


def test_headline_prefers_what_people_look_at_first() -> None:
    assert headline(row(1, 0.5)) == "loss 0.5, lr 1e-05"
    assert headline(Measured("s", 1, "train", {"odd": 1.5})) == "odd 1.5"


# --- the console


def test_plain_lines_have_no_control_codes_and_few_progress_lines() -> None:
    stream = io.StringIO()
    show = Console(stream)
    for event in a_run(steps=200):
        show(event)
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert "a sentence [with brackets]" in lines and "warning: something odd" in lines
    assert not [line for line in lines if re.match(r"sft: \d+/200", line)], "it was over in no time"
    assert "sft: eval step 200: loss 0.25, lr 1e-05" in lines
    assert lines[-1] == "sft: ended at step 200: loss 0.01, best 0.25"


def test_plain_lines_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 1000))
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(seconds))
    stream = io.StringIO()
    show = Console(stream)
    for done in range(1, 31):
        show(Progressed("tokenise", done, 30))
    assert 3 <= len(stream.getvalue().splitlines()) <= 20


def test_plain_lines_survive_a_narrow_encoding() -> None:
    raw = io.BytesIO()
    show = Console(io.TextIOWrapper(raw, encoding="ascii"))
    show(Said("π is not ASCII"))
    assert raw.getvalue() == b"? is not ASCII\n"


def test_a_terminal_gets_a_bar_with_rate_and_time_left() -> None:
    leader, follower = pty.openpty()
    code = (
        "import time\n"
        "from lemma.reporting.console import Console\n"
        "from lemma.core.events import *\n"
        "show = Console()\n"
        "show(StageStarted('sft', 0, 10)); show(Said('hello [bold]'))\n"
        "for step in range(1, 6):\n"
        "    time.sleep(0.1); show(Measured('sft', step, 'train', {'loss': 1.5}))\n"
        "    show(Progressed('sft', step, 10)); show(Progressed('validate', step, 5))\n"
        "time.sleep(0.4); show.close(False)\n"
    )
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=follower, env=env) as process:
        os.close(follower)
        seen = b""
        while True:
            try:
                chunk = os.read(leader, 4096)
            except OSError:
                break
            if not chunk:
                break
            seen += chunk
    os.close(leader)
    text = seen.decode()
    assert process.returncode == 0
    assert "\x1b[" in text and "hello [bold]" in text
    assert "5/10" in text and "left" in text and "loss 1.5" in text and "validate" in text


# --- run.log


def test_run_log_is_appended_and_mends_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("torn")
    with make_sink(tmp_path, tensorboard=False, wandb=None, recipe={}, console=False) as sink:
        sink(Said("first"))
        assert (tmp_path / "run.log").read_text().endswith("first\n")
        sink(Progressed("load", 1, 2))
        sink(row(7, 0.5))
        sink(Said("two\nlines", "error"))
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[0] == "torn" and len(lines) == 5
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d info    first", lines[1])
    assert lines[2].endswith("sft: train step 7: loss 0.5, lr 1e-05, seconds 0.5")
    assert " error " in lines[3] and lines[4] == "    lines"


def test_nothing_is_written_before_the_first_event(tmp_path: Path) -> None:
    with make_sink(tmp_path / "run", tensorboard=True, wandb="lemma", recipe={}, console=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with make_sink(tmp_path / "file" / "run", tensorboard=False, wandb=None, recipe={}) as sink:
        sink(Said("still here"))
    assert "warning: run.log failed ([Errno 20]" in capsys.readouterr().out


# --- TensorBoard


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def test_tensorboard_curves_do_not_double_after_a_restart(tmp_path: Path) -> None:
    def start(*events: Event) -> None:
        with make_sink(tmp_path, tensorboard=True, wandb=None, recipe={}, console=False) as sink:
            for event in events:
                sink(event)

    start(StageStarted("sft", 0, 3), *(row(step, 1.0) for step in (1, 2, 3)), StageEnded("sft", 3))
    start(StageStarted("rl", 0, 4), *(row(step, 5.0, "rl") for step in (1, 2, 3)))
    start(StageStarted("rl", 1, 4, resumed=True), *(row(step, 7.0, "rl") for step in (2, 3, 4)))
    assert curve(tmp_path / "tensorboard/rl", "rl/train/loss") == [(1, 5.0), (2, 7.0), (3, 7.0), (4, 7.0)]
    assert curve(tmp_path / "tensorboard/sft", "sft/train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert curve(tmp_path / "tensorboard/rl", "rl/train/seconds")[0] == (1, 0.5)
    start(StageStarted("rl", 0, 4), row(1, 9.0, "rl"))
    assert curve(tmp_path / "tensorboard/rl", "rl/train/loss") == [(1, 9.0)]


# --- Weights & Biases


def log_records(path: Path) -> list[bytes]:
    """The records of a wandb file, a LevelDB log: blocks of 32 KiB, chunks headed by checksum, size and kind."""
    data, place, records = path.read_bytes(), 7, [b""]
    while len(data) - place > 7:
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, size, kind = struct.unpack_from("<IHB", data, place)
        records[-1] += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            records.append(b"")
    return records


def offline_rows(run_dir: Path) -> list[dict[str, str]]:
    """The history of the newest offline run, as wandb itself wrote it."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in log_records(max(run_dir.glob("wandb/offline-run-*/run-*.wandb"), key=os.path.getmtime)):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return rows


WANDB_DIES = """
import sys, time
from pathlib import Path
import psutil
from lemma.core.events import Measured, StageStarted
from lemma.reporting import make_sink

with make_sink(Path(sys.argv[1]), tensorboard=False, wandb="lemma", recipe={}, console=False) as sink:
    import wandb
    sink(StageStarted("sft", 3, 9, resumed=True))
    print(wandb.run.id)
    for child in psutil.Process().children(recursive=True):
        child.kill()
        child.wait(60)
    log = Path(sys.argv[1], "run.log")
    step = 3
    while "failed" not in log.read_text() and step < 600:
        time.sleep(0.1)
        step += 1
        sink(Measured("sft", step, "train", {"loss": 0.1}))
    sink(Measured("sft", 1000, "train", {"loss": 0.1}))
"""


def test_wandb_offline_keeps_its_run_and_survives_the_death_of_its_service(tmp_path: Path) -> None:
    import wandb

    run_dir = tmp_path / "my-run"
    with make_sink(run_dir, tensorboard=False, wandb="lemma", recipe={"seed": 3}, console=False) as sink:
        sink(StageStarted("sft", 0, 3))
        assert wandb.run is not None
        assert wandb.run.config["seed"] == 3 and wandb.run.name == "my-run"
        first_id = wandb.run.id
        for event in a_run():
            sink(event)
    rows = offline_rows(run_dir)
    for _ in range(60):  # wandb's own process writes on a busy machine when it gets round to it
        if len(rows) == 4:
            break
        time.sleep(0.5)
        rows = offline_rows(run_dir)
    assert [row.get("sft/train_step") for row in rows] == ["1", "2", "3", None]
    assert rows[3]["sft/eval_step"] == "3" and rows[3]["sft/eval/loss"] == "0.25"
    assert "wandb sync" in (run_dir / "run.log").read_text()
    refuse_links(run_dir)

    command = [sys.executable, "-c", WANDB_DIES, str(run_dir)]
    own_service = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    again = subprocess.run(command, env=own_service, capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == first_id == (run_dir / "wandb_run_id").read_text().strip()
    log = (run_dir / "run.log").read_text()
    assert log.count("Weights & Biases failed") == 1 and "train step 1000" in log


def test_wandb_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(UserError, match=r"run\.wandb is 'lemma' but wandb is not installed; install it with"),
        make_sink(tmp_path, tensorboard=False, wandb="lemma", recipe={}, console=False),
    ):
        pass


# --- trouble


class Breaks:
    name = "the breaker"
    troubles: tuple[type[Exception], ...] = (OSError,)
    calls = 0

    def __call__(self, event: Event) -> None:
        self.calls += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self, failed: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class Keeps:
    name = "the keeper"
    troubles: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def close(self, failed: bool) -> None:
        self.failed = failed


def test_a_logger_that_fails_says_so_once_and_is_dropped() -> None:
    breaks, keeps = Breaks(), Keeps()
    sink = Loggers([breaks, keeps])
    for step in (1, 2, 3):
        sink(row(step, 0.5))
    warnings = [event.text for event in keeps.events if isinstance(event, Said)]
    assert breaks.calls == 1 and len(warnings) == 1
    assert "the breaker failed ([Errno 28] No space left on device); the run continues without it" in warnings[0]
    assert [event.step for event in keeps.events if isinstance(event, Measured)] == [1, 2, 3]


def test_trouble_while_closing_is_told_and_the_others_are_closed() -> None:
    keeps = Keeps()
    Loggers([keeps, Breaks()]).close(failed=True)
    assert keeps.failed and isinstance(keeps.events[0], Said)


def test_a_closed_pipe_does_not_end_the_run(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    keeps = Keeps()
    with os.fdopen(writer, "w") as pipe:
        sink = Loggers([Console(pipe), keeps])
        sink(Said("to nobody"))
        sink(Said("still here"))
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())
    assert [event.text for event in keeps.events if isinstance(event, Said)][-1] == "still here"


def test_an_error_of_the_run_passes_through(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        make_sink(tmp_path, tensorboard=False, wandb=None, recipe={}, console=False) as sink,
    ):
        sink(Said("before"))
        raise KeyError("a bug")
    assert "before" in (tmp_path / "run.log").read_text()


FULL_DISK = """
import resource, sys, time
from pathlib import Path
from lemma.core.events import Measured, Said, StageEnded, StageStarted
from lemma.reporting import make_sink

with make_sink(Path(sys.argv[1]), tensorboard=True, wandb=None, recipe={}) as sink:
    sink(StageStarted("sft", 0, 100))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    for step in range(1, 200):
        sink(Measured("sft", step, "train", {f"n{i}": 1.0 for i in range(9)}))
    time.sleep(0.5)
    sink(Measured("sft", 200, "train", {"n": 1.0}))
    sink(Said("it goes on"))
"""


def test_tensorboard_without_room_says_so_once_and_prints_no_traceback(tmp_path: Path) -> None:
    """A file that may not grow: the thread that writes events fails, as on a full disk."""
    ran = preloaded.run(["-c", FULL_DISK, tmp_path], timeout=120)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0 and "it goes on" in said and "Traceback" not in said
    assert said.count("TensorBoard failed ([Errno 27] File too large); the run continues without it") == 1


def test_the_log_ends_with_what_ended_the_run(tmp_path: Path) -> None:
    def ended_by(error: BaseException) -> str:
        run = tmp_path / type(error).__name__
        quiet = {"tensorboard": False, "console": False}
        with pytest.raises(type(error)), make_sink(run, wandb=None, recipe={}, **quiet) as sink:
            sink(Said("it runs"))
            raise error
        return (run / "run.log").read_text().split("it runs\n", 1)[1]

    told = ended_by(UserError("the disk is full", fix="make room"))
    assert told.endswith(" error   the disk is full; make room\n") and told.count("\n") == 1
    assert ended_by(KeyboardInterrupt()).endswith(" error   interrupted\n")
    traced = ended_by(ZeroDivisionError("by nothing"))
    assert " error   Traceback (most recent call last):\n" in traced
    assert traced.endswith("ZeroDivisionError: by nothing\n")


def test_a_run_that_never_began_leaves_no_log(tmp_path: Path) -> None:
    with pytest.raises(UserError), make_sink(tmp_path, tensorboard=False, wandb=None, recipe={}, console=False):
        raise UserError("the folder belongs to another run")
    assert list(tmp_path.iterdir()) == []
