"""What `make test` leaves to `make test-long` is there, and a case of it or another test stays."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENTRY = re.compile(r"(?P<path>[\w/]+\.py)::(?P<test>\w+)(?: but (?P<cases>.+?))? : (?P<guard>.{20,})")


def test_every_entry_names_a_test_and_what_guards_the_same() -> None:
    lines = (ROOT / "tests" / "long_tests.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line and not line.startswith("#"):
            entry = ENTRY.fullmatch(line)
            assert entry is not None, line
            source = (ROOT / entry["path"]).read_text(encoding="utf-8")
            assert f"def {entry['test']}(" in source, line
            for other in re.findall(r"\btest_\w+", entry["guard"]):
                known = (ROOT / "tests").rglob("*.py")
                assert any(
                    path.stem == other or f"def {other}(" in path.read_text(encoding="utf-8") for path in known
                ), other
