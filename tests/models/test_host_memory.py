"""Memory as a container sees it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from lemma.models.fitting import host_memory, memory_limit

GIB = 2**30
UNLIMITED = 9223372036854771712


V1 = "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n"
V1_FILE = "memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/\n", {"memory.max": 2 * GIB}, 2 * GIB),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/user/job\n", {"user/job/memory.max": 3 * GIB, "user/memory.max": 2 * GIB}, 2 * GIB),
        ("0::/user/job\n", {"user/job/memory.max": "max", "user/memory.max": 2 * GIB}, 2 * GIB),
        ("0::/not/seen/here\n", {"memory.max": 2 * GIB}, 2 * GIB),
        (V1, {f"memory/docker/abc/{V1_FILE}": 2 * GIB, f"memory/{V1_FILE}": UNLIMITED}, 2 * GIB),
        (V1, {f"memory/{V1_FILE}": 2 * GIB, "cpu/memory.max": 1}, 2 * GIB),
        (V1, {"unified/memory.max": 2 * GIB, f"memory/{V1_FILE}": UNLIMITED}, 2 * GIB),
        ("", {"memory.max": 2 * GIB}, None),
        ("odd\n\n0::/\n", {"memory.max": 2 * GIB}, 2 * GIB),
    ],
)
def test_the_lowest_limit_of_all_groups_counts(
    tmp_path: Path, membership: str, files: dict[str, str | int], limit: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    assert memory_limit(tmp_path) == limit


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None


def test_a_limit_above_what_the_machine_has_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    total = psutil.virtual_memory().total
    for limit, found in ((None, total), (UNLIMITED, total), (GIB, min(GIB, total))):
        monkeypatch.setattr("lemma.models.fitting.memory_limit", lambda limit=limit: limit)
        assert host_memory() == found
