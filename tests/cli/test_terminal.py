"""What somebody else wrote reaches a terminal as text: no sequence that it would obey, by any command that shows it."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pty
import re
import shutil
import threading
import warnings
from pathlib import Path

import pytest

from lemma.core.errors import UserError, warnings_said
from lemma.core.events import Said
from lemma.core.terminal import VisibleStream, show_error, show_thread_error, unescaped, visible, visible_logs
from lemma.data.hub import ORIGIN, hub_origin
from tests.preloaded import Python
from tests.serving.parrot import write_parrot

# A title, the clipboard, a cleared screen, a C1 sequence, a turned line, a line that overwrites the one before.
EVIL = "\x1b]0;owned\x07 \x1b]52;c;b3duZWQ=\x07 \x1b[2J \x9b2J \u202eevil\u202c a\rb \x08\x7f"
OBEYED = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\x1b(?!\\[[0-9;]*m)|\r(?!\n)"
)

DEBUG = ["debug", "speaks", "--recipe", "recipe.yaml", "--show", "2", "--groups", "2"]
AGAINST = ["--against", "rows.jsonl"]


# The tests ask transformers for errors only.
COMMAND = """
import sys, transformers
from lemma.cli import main
transformers.logging.set_verbosity_warning()
sys.exit(main())
"""


def on_terminal(folder: Path, *arguments: str, typed: bytes = b"") -> tuple[int, str]:
    """What a command writes to a terminal, with its exit code. The terminal itself ends lines by `\\r\\n`."""
    reading, writing = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    words = ["-c", COMMAND, *arguments]
    with Python(words, cwd=folder, env=env, stdin=writing, stdout=writing, stderr=writing) as process:
        os.close(writing)
        os.write(reading, typed)
        data = b""
        while True:
            try:
                piece = os.read(reading, 65536)
            except OSError as error:  # so a terminal ends whose last program is gone
                assert error.errno == errno.EIO
                break
            if not piece:
                break
            data += piece
        code = process.wait()
    os.close(reading)
    return code, data.decode()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parrot(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def foreign(tmp_path: Path, tiny: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": f"what {EVIL}", "answer": f"7 {EVIL}"}) + "\n")
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prediction": f"it is 7 {EVIL}", "gold": "7"}) + "\n")
    (tmp_path / "rewards.py").write_text(f"def judge(completions, **more):\n    raise ValueError({EVIL!r})\n")
    shutil.copytree(tiny, tmp_path / "model")
    # A model that says a sequence for ever.
    write_parrot(tmp_path / "speaks", ("Assistant:", "pens", "pens"))
    words = tmp_path / "speaks" / "tokenizer.json"
    words.write_text(words.read_text().replace('"pens"', json.dumps("\x1b[2J\x9b")))
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": EVIL}))
    run = tmp_path / "runs" / EVIL.replace("/", "").replace("\x00", "")
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("stages: {sft: {}}")
    (run / "run.json").write_text("{}")
    for step in (2, 4):
        (run / "stages" / "sft" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    stage = {"kind": "rl", "steps": 1, "batch": {"problems": 2}, "rewards": ["rewards.py:judge"]}
    stage |= {"algorithm": {"name": "grpo", "group_size": 2}, "rollout": {"max_tokens": 4}, "data": {"count": 4}}
    recipe = {"run": {"dir": "out", "device": "cpu"}, "model": {"path": "tiny"}, "stages": {"rl": stage}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        (["data", "show", "rows.jsonl"], "what \\x1b]0;owned\\x07"),
        (["grade", "answers.jsonl"], "it is 7"),
        (["runs", "runs"], "\\x1b]0;owned\\x07"),
        (["runs", "clean", "runs"], "\\x1b]0;owned\\x07"),
        (["compare", *[f"runs/{EVIL.replace('/', '')}"] * 2], "warning: runs/\\x1b]0;owned\\x07"),
        (["train", "recipe.yaml"], "\\x1b]0;owned\\x07"),
        (["generate", "model", "how many"], "model of type `\\x1b]0;owned\\x07"),
        (["generate", "speaks", "how many ?", "--max-tokens", "4"], "\\x1b[2J\\x9b"),
        ([*DEBUG, "--set", "format=own", "--set", "stages.rl.rewards=[accuracy]"], "\\x1b[2J\\x9b"),
        (["data", "check", "recipe.yaml", "--set", "stages.rl.data={source: rows.jsonl}", *AGAINST], "\\x1b]0;owned"),
        (["download", "model", "a/b", "--only", EVIL], "offline"),
        (["download", "model", EVIL], "\\x1b]0;owned\\x07"),
        (["train", "nowhere.yaml", "--set", f"a={EVIL}"], "nowhere.yaml"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_no_command_passes_on_what_a_terminal_obeys(foreign: Path, command: list[str], shows: str) -> None:
    _, text = on_terminal(foreign, *command, typed=b"n\n" if "clean" in command else b"")
    if command[0] == "train":  # progress bars move the cursor, and only they
        text = re.sub(r"\x1b\[(\d*[AK]|\?25[lh])|\r", "", text)
    assert shows in text
    assert OBEYED.search(text.replace("\r\n", "\n")) is None, text


def test_an_evaluation_of_somebody_else(foreign: Path) -> None:
    """The name of a benchmark stands in every file of it."""
    assert on_terminal(foreign, "eval", "tiny", "--benchmarks", "rows.jsonl", "--to", "theirs")[0] == 0
    for path in (foreign / "theirs").iterdir():
        path.write_text(path.read_text().replace('"rows"', json.dumps(f"rows{EVIL}")))
    code, text = on_terminal(foreign, "eval", "--rescore", "theirs", "--to", "again")
    text = re.sub(r"\x1b\[(\d*[AK]|\?25[lh])|\r", "", text)  # bars
    assert code == 0 and "\\x08\\x7f: 0 of 1 verdicts are different now" in text
    assert OBEYED.search(text) is None, text


def test_a_stream_of_visible_text() -> None:
    stream = io.StringIO()
    shown = VisibleStream(stream)
    print("a\tb\x1b[2J", file=shown)
    shown.writelines(["\x9b", "é ∀ 数 ا\n"])
    assert stream.getvalue() == "a\tb\\x1b[2J\n\\x9bé ∀ 数 ا\n" and unescaped(shown) is stream is unescaped(stream)
    assert visible("\u202e\u2066\x07") == "\\u202e\\u2066\\x07"


def test_sentences_are_visible_wherever_they_go() -> None:
    assert "\x1b" not in str(UserError(EVIL, file=EVIL, fix=EVIL)) and "\x1b" not in Said(EVIL).text


def test_tracebacks_and_warnings_are_visible(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(ValueError, ValueError(EVIL), None)
    assert "\\x1b]0;owned" in capsys.readouterr().err
    heard: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *place: heard.append(str(message))
        with warnings_said(print):
            warnings.warn(EVIL, stacklevel=1)
    assert heard == [visible(EVIL)]


def test_errors_in_logs_and_threads_are_visible(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.excepthook", show_thread_error)

    def fail() -> None:
        raise ValueError(EVIL)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    log, said = logging.getLogger("somebody"), io.StringIO()
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(said)])
    with visible_logs():
        try:
            fail()
        except ValueError:
            log.exception("read %s", EVIL)
    for text in (capsys.readouterr().err, said.getvalue()):
        assert "ValueError: \\x1b]0;owned" in text and OBEYED.search(text) is None


def test_the_name_of_a_base_model_is_a_name(tmp_path: Path) -> None:
    (tmp_path / ORIGIN).parent.mkdir()
    for name, found in {"someone/model-1.5B": "someone/model-1.5B", f"a/b{EVIL}": None, "a/b)\n# c": None}.items():
        (tmp_path / ORIGIN).write_text(json.dumps({"repository": name}))
        assert hub_origin(tmp_path) == found
