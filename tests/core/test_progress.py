"""Long work is told while it goes on, and short work is not."""

from __future__ import annotations

import gc
import gzip
import json
from pathlib import Path

import pytest

from lemma.core import events
from lemma.core.collector import loading
from lemma.core.events import counted, telling
from lemma.data.read_files import read_file

Told = list[tuple[str, int, int]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What is told where no work is too short."""
    monkeypatch.setattr(events, "PATIENCE", 0.0)
    monkeypatch.setattr(events, "BETWEEN", 0.0)
    return []


def test_long_work_is_told_to_its_end(told: Told) -> None:
    with telling(lambda *one: told.append(one)):
        assert list(counted(iter(range(600)), "counting", 600)) == list(range(600))
    assert told == [("counting", 0, 600), ("counting", 256, 600), ("counting", 512, 600), ("counting", 600, 600)]


def test_short_work_is_silent() -> None:
    said: Told = []
    with telling(lambda *one: said.append(one)):
        assert len(list(counted(range(600), "counting", 600))) == 600
    assert said == []


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_reading_a_file_is_told_in_bytes_of_the_file(ending: str, told: Told, tmp_path: Path) -> None:
    path = tmp_path / f"rows.jsonl{ending}"
    content = "".join(json.dumps({"question": f"{n} ?", "answer": str(n)}) + "\n" for n in range(5_000)).encode()
    path.write_bytes(gzip.compress(content) if ending else content)
    size = path.stat().st_size
    with telling(lambda *one: told.append(one)):
        assert [row.values["answer"] for row in read_file(path)] == [str(n) for n in range(5_000)]
    assert {(what, total) for what, _, total in told} == {(f"reading {path.name} (bytes)", size)}
    places = [done for _, done, _ in told]
    assert places == sorted(places) and 0 < places[0] < size and places[-1] == size


def test_the_collector_rests_while_much_is_loaded_and_works_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), loading():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
