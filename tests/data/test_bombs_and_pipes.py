"""Data that would fill the memory or never come: one sentence, at once."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lemma.core.errors import UserError
from lemma.data import bounded_lines
from lemma.data.data_options import DataOptions
from lemma.data.read_files import read_file
from lemma.data.sources import files_of

MIB = 2**20
READ = """
import sys
from pathlib import Path
from lemma.core.errors import UserError
from lemma.data.read_files import read_file
try:
    print(sum(1 for row in read_file(Path(sys.argv[1]))))
except UserError as error:
    print(error)
"""


def read_in_little_memory(path: Path) -> str:
    """What reading a file says in a process that may take 1 GiB."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1024 * MIB, 1024 * MIB))

    command = [sys.executable, "-c", READ, str(path)]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.mark.parametrize(
    ("name", "start"), [("a.jsonl.gz", b'{"question": "'), ("a.csv.gz", b"question,"), ("a.json.gz", b'["')]
)
def test_one_line_of_gigabytes(name: str, start: bytes, tmp_path: Path) -> None:
    """A gzip member holds 100 MB of zeros, and a file may hold many: 6 GB in 6 MB."""
    member = gzip.compress(b"\0" * 100 * MIB, 1)
    path = tmp_path / name
    path.write_bytes(gzip.compress(start) + member * 60)
    assert path.stat().st_size < 40 * MIB
    said = read_in_little_memory(path)
    assert said.startswith(f"{path}: a line of this file is longer than 64 MiB; write one row per line")


def test_a_list_of_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_lines, "LONGEST_LIST", 1000)
    path = tmp_path / "a.json"
    path.write_text("[\n" + '{"question": "1", "answer": "1"},\n' * 1000 + '{"question": "1"}]')
    with pytest.raises(UserError, match=r"this file is one list of more than .* write one object per line, as \.jsonl"):
        list(read_file(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.json.gz"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    for read in (lambda: files_of(DataOptions(source=str(path))), lambda: list(read_file(path))):
        with pytest.raises(UserError, match="this is not a file but a pipe or a device; write its content to a file"):
            read()
