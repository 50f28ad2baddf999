"""What the pages are made of: files that grow, columns of numbers, states of runs, pieces of text, what is chosen."""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path

import numpy as np
import pytest

from lemma.core.errors import UserError
from lemma.core.events import Said, StageStarted
from lemma.core.files import JsonLines
from lemma.reporting.logfile import LogFile
from lemma.reports.curves import Curves, Metrics
from lemma.reports.page import make_page
from lemma.reports.page_data import PageData
from lemma.reports.report_file import in_turn, spread
from lemma.reports.run_reader import ChunkPlace, RunReader, open_runs
from lemma.reports.run_state import Log, state_of
from lemma.reports.shown_samples import DEEPEST, FIRST_LEVEL, LEVELS, first_groups, levels_of
from lemma.reports.tailed import TailedFile
from lemma.reports.token_texts import TORN, TokenTexts
from tests.reports.made_runs import TINY, measure, recipe, sample, small_run, write_byte_tokenizer, write_journal


def test_a_growing_file_is_read_once_and_a_rewritten_one_again(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    tailed = TailedFile(path)
    assert tailed.look() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert tailed.look() == [b"one", b"two"]
    with open(path, "ab") as handle:
        handle.write(b"ee\n")
    assert tailed.look() == [b"three"] and tailed.rewritten == 0
    path.write_bytes(b"one\n2\nthree\nfour\nfive\n")  # longer than before, with another second line
    assert tailed.look() == [b"one", b"2", b"three", b"four", b"five"] and tailed.rewritten == 1


def test_columns_have_gaps_where_rows_lack_a_number() -> None:
    curves = Curves()
    curves.add({"step": 1, "loss": 0.123456789, "timings": {"seconds": 1.0, "held_by": "grade"}})
    curves.add({"step": 2, "new": 1, "loss": math.inf, "word": "x", "timings": {}})
    assert curves.after(0) == {
        "steps": [1, 2],
        "values": {"loss": [0.123457, None], "new": [None, 1]},
        "timings": {"seconds": [1.0, None]},
        "held_by": ["grade", ""],
    }
    assert curves.after(1)["values"] == {"loss": [None], "new": [1]}


def test_rows_that_a_resumed_run_took_back_disappear(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    metrics = Metrics(lines.path)
    for step in (1, 2, 3):
        size = lines.size
        lines.append({"stage": "s", "step": step, "axis": "train", "loss": 10.0 + step})
    metrics.look()
    assert metrics.curves["s", "train"].steps == [1, 2, 3]
    lines.truncate(size)
    for step in (3, 4):
        lines.append({"stage": "s", "step": step, "axis": "train", "loss": 20.0 + step})
    metrics.look()
    assert metrics.curves["s", "train"].values["loss"] == [11.0, 12.0, 23.0, 24.0]
    assert metrics.generation == 1


def test_a_damaged_line_hides_no_other(tmp_path: Path) -> None:
    row = json.dumps({"stage": "s", "step": 1, "axis": "train", "loss": 1.0})
    (tmp_path / "m").write_text(f"\n[]\n{{broken\n{row}\n")
    metrics = Metrics(tmp_path / "m")
    metrics.look()
    assert metrics.curves["s", "train"].steps == [1]


def test_the_state_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe(run)

    def state() -> str:
        reader = RunReader(run)
        reader.look()
        return reader.state

    assert state() == "new"
    measure(run, [1, 2])
    assert state() == "dead"
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state() == "running"
    log = LogFile(run / "run.log")
    log(Said("grpo: stopped after saving; the same command resumes from here"))
    assert state() == "stopped"
    log(StageStarted("grpo", 2, 9, resumed=True))
    assert state() == "dead", "it went on, and died"
    (run / "stages" / "grpo").mkdir(parents=True)
    (run / "stages" / "grpo" / "done.json").write_text("{}")
    assert state() == "finished"


def test_looking_at_a_run_takes_no_lock_from_it(tmp_path: Path) -> None:
    small_run(tmp_path / "run", steps=1)
    with open(tmp_path / "run" / ".lock", "w") as lock:
        state_of(tmp_path / "run", ["grpo"], "")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_log_tells_warnings_and_totals_as_the_logger_writes_them(tmp_path: Path) -> None:
    writer = LogFile(tmp_path / "run.log")
    for event in (
        StageStarted("sft", 0, 12),
        Said("no step: look\nhere", "warning"),
        StageStarted("grpo", 4, 30, resumed=True),
        Said("step 5: the entropy fell", "warning"),
    ):
        writer(event)
    log = Log(tmp_path / "run.log")
    log.look()
    assert log.totals == {"sft": 12, "grpo": 30}
    assert [(one.stage, one.step, one.text) for one in log.remarks] == [
        ("sft", None, "no step: look"),
        ("grpo", 5, "the entropy fell"),
    ]


@pytest.mark.parametrize("text", ["plain words", "Ωmega → 😀 ñ", "e\u0301 \U0001f1eb\U0001f1f7"])
def test_pieces_of_bytes_make_whole_characters(text: str, tmp_path: Path) -> None:
    tokenizer = write_byte_tokenizer(tmp_path)
    pieces = TokenTexts(tokenizer).pieces(tokenizer.encode(text).ids)
    assert len(pieces) == len(text.encode())
    assert "".join(pieces) == text


def test_bytes_of_no_character_are_shown_and_take_nothing_with_them(tmp_path: Path) -> None:
    tokenizer = write_byte_tokenizer(tmp_path)
    half = tokenizer.encode("😀").ids[:2]
    pieces = TokenTexts(tokenizer).pieces([*half, *tokenizer.encode("a😀").ids])
    assert pieces == [TORN, TORN, "a", "", "", "", "😀"]


def test_words_of_a_tokenizer_without_spaces_are_apart() -> None:
    tokens = TokenTexts(TINY.backend_tokenizer)
    assert "".join(tokens.pieces(TINY.encode("3 + 4 = 7"))) == " 3 + 4 = 7"


def test_levels_tell_log_probabilities() -> None:
    logprobs = np.array([0.0, -0.01, -0.7, -5.0, -40.0, np.nan, -np.inf], dtype=np.float32)
    levels = levels_of(logprobs)
    found = [-DEEPEST * ((ord(level) - FIRST_LEVEL) / LEVELS) ** 2 for level in levels]
    assert found[:4] == pytest.approx([0.0, -0.01, -0.7, -5.0], abs=0.15, rel=0.05)
    assert found[4:] == [-16.0] * 3


def test_chosen_steps_are_spread_and_sources_take_turns() -> None:
    assert spread(0) == [] and spread(1) == [0]
    order = spread(1000)
    assert sorted(order) == list(range(1000)) and order[:2] == [999, 0]
    gaps = np.diff(sorted(order[:65]))
    assert gaps.min() >= 15 and gaps.max() <= 16
    places = [ChunkPlace(f"{s}/{i}", s, i, Path()) for s in "ab" for i in range(3)]
    assert [one.key for one in in_turn(places)] == ["a/2", "b/2", "a/0", "b/0", "a/1", "b/1"]


def test_groups_are_kept_whole() -> None:
    samples = [{"group": g, "number": n, "prompt": 4 - g} for g in range(5) for n in range(3)]
    found = first_groups({"prompts": list("abcde"), "samples": samples}, 5)
    assert [(s["group"], s["number"]) for s in found["samples"]] == [(g, n) for g in range(2) for n in range(3)]
    assert [found["prompts"][s["prompt"]] for s in found["samples"]] == ["e"] * 3 + ["d"] * 3
    assert found["all"] == 15


def test_a_folder_that_is_no_run_is_refused_and_twins_have_different_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the folder of a run"):
        RunReader(tmp_path)
    for name in ("a/run", "b/run"):
        recipe(tmp_path / name)
    names = [run.name for run in open_runs([tmp_path / "a/run", tmp_path / "b/run"])]
    assert len(set(names)) == 2


def test_a_live_page_gets_only_what_it_has_not_seen(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=3)
    data = PageData([RunReader(run)], [""])
    whole = data.whole()["runs"][0]
    seen = {"generation": whole["generation"], "counts": {"grpo/train": 3}}
    measure(run, [4])
    curves = data.since([seen])["runs"][0]["curves"]["grpo/train"]
    assert curves["from"] == 3 and curves["steps"] == [4]
    again = data.since([{"generation": 99, "counts": {"grpo/train": 3}}])["runs"][0]["curves"]["grpo/train"]
    assert again["from"] == 0 and again["steps"] == [1, 2, 3, 4], "a page of another generation gets everything"


def test_a_journal_that_is_damaged_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lemma.cli import main

    run = small_run(tmp_path / "run", steps=3)
    (run / "stages/grpo/journal/step-000002.jsonl").write_text("{broken\n")
    assert main(["report", str(run)]) == 0
    assert "2 of 3 steps" in capsys.readouterr().out
    assert (run / "report.html").is_file()


def test_braces_in_what_a_run_says_change_nothing() -> None:
    assert "{{script}}" in make_page("{{script}}", "", {})


def test_a_sample_without_a_tokenizer_is_shown_as_it_was_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe(run)
    write_journal(run, 1, [sample(1, 0, 0, "3 + 4 = 7")])
    reader = RunReader(run)
    reader.recipe["model"]["path"] = "nobody/knows-this"
    (place,) = reader.chunks()
    (shown,) = reader.read(place)["samples"]
    assert shown["parts"] == [{"kind": "sampled", "text": "3 + 4 = 7"}]
