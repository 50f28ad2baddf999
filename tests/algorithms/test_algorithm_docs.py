"""The pages about algorithms: all of them, all of their options, links that lead somewhere, an example that works."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from lemma.algorithms import ALGORITHMS
from lemma.algorithms.algorithm import Algorithm, AlgorithmState
from lemma.algorithms.parts.policy_gradient import PolicyGradient
from lemma.config import Options
from lemma.config.shape import annotation_of, classes_below
from lemma.core.errors import UserError
from lemma.stages.reinforcement.rl_options import ReinforcementOptions, RolloutOptions
from tests.algorithms import toy
from tests.algorithms.made import group, response, trajectory

DOCS = Path(__file__).resolve().parents[2] / "docs"
INDEX = DOCS / "algorithms" / "README.md"
PAGES = [*(DOCS / "algorithms").glob("*.md"), DOCS / "reinforcement.md", DOCS / "luffy.md"]
HOW_TO = DOCS / "how-to" / "add-an-algorithm.md"


def test_the_defaults_that_beginners_read() -> None:
    """Each setting of the first table of "Where to begin", with its default."""
    section = (DOCS / "reinforcement.md").read_text(encoding="utf-8").split("## Where to begin\n")[1].split("\n## ")[0]
    table = section.split("\n\n")[1]
    stage = ReinforcementOptions(steps=1).model_dump()
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (\S+|what the context leaves) \|", table, re.MULTILINE)
    assert len(rows) == 5
    for part, name, default in rows:
        assert stage[part][name] == (None if " " in default else float(default)), f"{part}.{name}"


def page_of(name: str) -> Path:
    """The page that the index links from the row of this algorithm."""
    found = re.search(rf"^\| \[`{name}`\]\(([^)]+)\)", INDEX.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"docs/algorithms/README.md has no row for {name}"
    return (INDEX.parent / found[1]).resolve()


def options_of(kind: type[Options], prefix: str = "") -> list[str]:
    """Names of all options, those of sections as `section.option`; a section that may be absent is one option."""
    names = []
    for name, info in kind.model_fields.items():
        inner = [cls for _, cls in classes_below(annotation_of(info))]
        if inner and info.default is not None:
            names += options_of(inner[0], f"{prefix}{name}.")
        elif name != "name":
            names.append(f"{prefix}{name}")
    return names


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_page_that_names_its_options(name: str) -> None:
    text = page_of(name).read_text(encoding="utf-8")
    assert text.startswith(f"# {name}") or f", {name}\n" in text or name == "luffy"
    shared = set(options_of(Algorithm))
    if issubclass(ALGORITHMS[name], PolicyGradient):
        text += INDEX.read_text(encoding="utf-8")
    words = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    unnamed = [option for option in options_of(ALGORITHMS[name]) if option not in shared and not _named(option, words)]
    assert not unnamed


def _named(option: str, words: set[str]) -> bool:
    """`off_policy.gamma`, or, in a row that lists several, `.gamma`; constants of on_policy are told of off_policy."""
    section, _, last = option.rpartition(".")
    twin = option.replace("compat.on_policy.", "off_policy.")
    return option in words or twin in words or (bool(section) and f".{last}" in words)


def test_the_stage_page_names_the_options_of_the_stage() -> None:
    text = (DOCS / "reinforcement.md").read_text(encoding="utf-8")
    own = set(ReinforcementOptions.model_fields) - {"start_from", "log_every"}
    for name in [*own, *RolloutOptions.model_fields]:
        assert name.replace("_", " ") in text or name in text, name


@pytest.mark.parametrize("path", [*PAGES, HOW_TO], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).is_file(), target


@pytest.mark.parametrize("path", [*PAGES, HOW_TO], ids=lambda path: path.name)
def test_named_recipes_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for place in re.findall(r"`((?:lemma|tests|recipes|docs)/[\w./-]+\.(?:py|yaml|md))`", text):
        assert (DOCS.parent / place).is_file() or place == "docs/algorithms/ranked.md", place


def test_the_example_of_the_how_to_works(tmp_path: Path) -> None:
    """It is a file of at most 40 lines outside the package, and a recipe trains with it."""
    code = re.search(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), re.DOTALL)
    assert code and len(code[1].splitlines()) <= 40
    file = tmp_path / "ranked.py"
    file.write_text(code[1], encoding="utf-8")
    named = {"name": f"{file}:Ranked", "spread": 2.0, "group_size": 4}
    ranked = ReinforcementOptions.model_validate({"algorithm": named}).algorithm
    best, middle, worst = trajectory(9.0), trajectory(1.0), trajectory(0.0)
    dead = group(trajectory(1.0), trajectory(1.0))
    ranked.assign([group(best, middle, worst), dead], AlgorithmState())
    assert [response(item, "advantage")[0] for item in (best, middle, worst)] == [2.0, 0.0, -2.0]
    assert ranked.has_signal(group(best, worst)) and not ranked.has_signal(dead)
    assert all(np.all(item.token_fields["advantage"] == 0) for item in dead.trajectories)
    stage = toy.reinforcement(tmp_path, named, steps=2, rewards=[toy.PARITY])
    assert [row["updates"] for row in toy.Toy(tmp_path).train(stage)] == [1.0, 1.0]


def test_names_that_algorithms_had_before_are_told_with_the_new_ones() -> None:
    with pytest.raises(UserError, match=r"Own defines is_live, which algorithms call has_signal; rename it"):
        type("Own", (PolicyGradient,), {"is_live": lambda self, group: True})
    with pytest.raises(ImportError, match=r"Memory of lemma\.algorithms is called AlgorithmState"):
        importlib.import_module("lemma.algorithms").Memory  # noqa: B018
