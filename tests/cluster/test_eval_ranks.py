"""`lemma eval`, `debug` and `generate` on 1, 2 and 4 ranks: the same files, the same page, no process left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lemma.cli import main
from lemma.cluster.launching import Launcher
from tests.cluster.crew import Crew
from tests.cluster.forked import ForkedRank

FILES = ["results.json", "results.csv", "results.md", "samples.jsonl", "questions.csv", "settings.json"]
PLACES = ("--device", "cpu")
RECIPE = """
run: {dir: run, device: cpu}
format: {name: r1_zero, preamble: false}
stages:
  rl:
    kind: rl
    data: {arithmetic: {count: 40, operations: 2}}
    algorithm: {name: grpo, group_size: 3}
    rollout: {max_tokens: 6}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    arithmetic = {"operations": 1, "largest": 10, "count": 14}
    # Without symbols, verdicts need no process of their own.
    sums = {"name": "sums", "source": "arithmetic", "arithmetic": arithmetic, "rules": {"symbolic": False}}
    (folder / "sums.yaml").write_text(yaml.safe_dump(sums))
    # Long enough for several packs of 2,048 tokens.
    rows = [
        {"question": "count " + "1 + 2 " * (60 + 4 * n), "choices": ["3", "4 + 5"], "answer": n % 2} for n in range(20)
    ]
    (folder / "options.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "questions.txt").write_text("".join(f"what is {n} + 2 ?\n" for n in range(5)))
    return folder


def sums(data: Path, out: Path, *more: str) -> list[str]:
    settings = ["--samples", "3", "--temperature", "1", "--max-tokens", "8", "--format", "r1_zero", "--seed", "2"]
    return ["eval", "tiny", "--benchmarks", str(data / "sums.yaml"), "--to", str(out), *settings, *PLACES, *more]


def said(arguments: list[str]) -> tuple[int, str]:
    """Run a command on this rank: its exit code, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        return main(arguments), printed.getvalue()


def on(crew: Crew, ranks: int, arguments: list[str]) -> str:
    """What the first rank prints; the others print nothing."""
    (code, text), *others = crew.run(ranks, said, arguments)
    assert code == 0 and others == [(0, "")] * (ranks - 1)
    return text


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def alone(crew: Crew, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    on(crew, 1, sums(data, out))
    return out


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_evaluation(crew: Crew, data: Path, alone: Path, tmp_path: Path, ranks: int) -> None:
    table = on(crew, ranks, sums(data, tmp_path))
    assert table == (alone / "results.md").read_text()
    assert contents(tmp_path) == contents(alone)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "metadata.json", ".lock"])
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 14 * 3


@pytest.mark.parametrize("kind", ["environment", "likelihood"])
def test_what_is_played_and_what_is_weighed(crew: Crew, data: Path, tmp_path: Path, kind: str) -> None:
    words = ["--likelihood"] if kind == "likelihood" else ["--environment", "higher_lower", "--max-tokens", "3"]
    source = data / ("options.jsonl" if kind == "likelihood" else "sums.yaml")
    for ranks in (1, 2):
        out = str(tmp_path / str(ranks))
        on(crew, ranks, ["eval", "tiny", "--benchmarks", str(source), "--to", out, *words, *PLACES])
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    row = json.loads((tmp_path / "1/samples.jsonl").read_text().splitlines()[0])
    assert len(row["turns"]) == 5 if kind == "environment" else len(row["options"]) == 2


def test_debug_prints_the_same_page(crew: Crew, data: Path, tmp_path: Path) -> None:
    words = ["debug", "tiny", "--recipe", str(data / "recipe.yaml"), "--groups", "5", *PLACES]
    pages = [on(crew, ranks, [*words, "--json", str(tmp_path / f"{ranks}.json")]) for ranks in (1, 2)]
    assert pages[0] == pages[1] and pages[0].startswith("5 problems x 3 samples")
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    # The last bit of a log-probability may depend on what else was in a batch.
    assert one["numbers"].pop("logprob") == pytest.approx(two["numbers"].pop("logprob"), abs=1e-5)
    assert one == two


def test_generate_shares_out_a_file(crew: Crew, data: Path) -> None:
    words = ["generate", "tiny", "--file", str(data / "questions.txt"), "--samples", "2", "--max-tokens", "4", *PLACES]
    assert on(crew, 1, words) == on(crew, 2, words) != ""


# --- ranks that were started by the command ------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ForkedRank]:
    """Ranks as `lemma eval --ranks 2` starts them, but forked; those that were started."""
    started: list[ForkedRank] = []

    def start_rank(self: Launcher, command: Sequence[str], env: dict[str, str], output: Path | None) -> Any:
        started.append(ForkedRank(list(command[3:]), env, output or tmp_path / "terminal.txt"))
        return started[-1]

    monkeypatch.setattr(Launcher, "start_rank", start_rank)
    return started


def left_of(ranks: Sequence[ForkedRank]) -> list[int]:
    """Processes in the sessions of these ranks."""
    sessions, left = {one.pid for one in ranks}, []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, *rest = path.read_text().rpartition(")")[2].split()
            left += [int(path.parent.name)] if int(rest[2]) in sessions and state != "Z" else []
    return left


def test_a_rank_that_dies_ends_the_others_and_nothing_is_sampled_twice(
    data: Path, alone: Path, tmp_path: Path, ranks: list[ForkedRank], capfd: pytest.CaptureFixture[str], crew: Crew,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LEMMA_FAULT", "jsonl.mid_line:4@1")
    out = tmp_path / "out"
    assert main(sums(data, out, "--ranks", "2")) == 1
    died = (out / "journal.slot-001.jsonl").stat().st_mtime
    assert time.time() - died < 30 and left_of(ranks) == []
    assert capfd.readouterr().err == (
        "lemma: error: rank 1 was killed by SIGKILL; the same command resumes from there\n"
    )
    journals = {path.name: path.read_text().count("\n") for path in out.glob("journal*")}
    assert 3 <= journals["journal.slot-001.jsonl"] < 7 * 3, "those that were settled together are written together"
    monkeypatch.delenv("LEMMA_FAULT")
    crew.run(1, said, sums(data, out))
    assert contents(out) == contents(alone) and not list(out.glob("journal*"))


def test_ctrl_c_leaves_nothing(
    data: Path, tmp_path: Path, ranks: list[ForkedRank], capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        until = time.monotonic() + 60
        while not (tmp_path / "out/journal.slot-001.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main(sums(data, tmp_path / "out", "--ranks", "2", "--samples", "4000")) == 130
    terminal = (tmp_path / "terminal.txt").read_text() + capfd.readouterr().err
    assert "lemma: interrupted" in terminal and "Traceback" not in terminal
    assert len(ranks) == 2 and left_of(ranks) == []


def test_a_mistake_is_said_once(data: Path, tmp_path: Path, ranks: list[ForkedRank], capfd: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("something else")
    assert main(sums(data, tmp_path / "out", "--ranks", "2")) == 2
    terminal = (tmp_path / "terminal.txt").read_text() + capfd.readouterr().err
    assert terminal.count("error") == 1 and "holds something other than an evaluation" in terminal


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "0"], "--ranks 0 is not a number of processes; write 1 or more"),
        (["--ranks", "100000"], "--ranks is 100000, and this machine allows"),
        (["--ranks", "2", "--engine", "vllm"], "vLLM has processes of its own and does not run on 2 ranks"),
    ],
)
def test_wrong_numbers_are_refused(data: Path, tmp_path: Path, capfd: Any, words: list[str], sentence: str) -> None:
    assert main(sums(data, tmp_path / "out", *words)) == 2
    assert sentence in capfd.readouterr().err and not (tmp_path / "out").exists()


def test_one_question_is_not_shared_out(capfd: Any) -> None:
    assert main(["generate", "tiny", "what ?", "--ranks", "2"]) == 2
    assert "one question cannot be shared out; leave --ranks out" in capfd.readouterr().err
