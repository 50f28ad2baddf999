"""The pages name everything there is."""

from __future__ import annotations

from pathlib import Path

from lemma.grading import REASONS
from lemma.grading.compat import COMPAT
from lemma.grading.rules import ORDER
from lemma.rewards import REWARDS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_reward_has_its_row_with_its_options() -> None:
    rows = [line for line in (DOCS / "rewards.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(REWARDS)
    for row in rows:
        name, options = row.split("`")[1], row.rsplit("|", 2)[1]
        own = [f"`{field}`" for field in REWARDS[name].model_fields if field not in ("name", "weight")]
        written = [one for one in options.strip().split(", ") if one]
        assert sorted(written) == sorted(own), name


def test_every_reason_rule_and_grader_is_explained() -> None:
    page = (DOCS / "grading.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in (*REASONS, *ORDER))
    assert all(f"`{name}`" in page for name in COMPAT if not name.startswith("luffy_v"))
