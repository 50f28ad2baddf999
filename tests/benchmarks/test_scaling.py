"""The benchmark of a step's size runs the parts that training uses, on completions that are ready."""

from __future__ import annotations

from benchmarks.scaling import handled, table


def test_a_small_step_is_measured_part_by_part() -> None:
    found = handled({"who": "made before", "tokens": 600})
    assert found["sampled"] >= 600 and found["bytes"] >= 0
    assert all(spent >= 0 for spent in found["microseconds"].values())
    assert {"play, score, journal, groups", "plan of packs", "read again", "report"} <= set(found["microseconds"])
    assert f"| {found['sampled']:,} |" in table([found, {"who": "made before", "error": "too slow"}])
