"""Whatever is written, the answer is a recipe or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lemma.config.document import write
from lemma.config.explain import MOST
from lemma.core.errors import UserError
from lemma.recipe import load_recipe

TEXT = (Path(__file__).resolve().parents[2] / "recipes" / "luffy_sft.yaml").read_text(encoding="utf-8")
quick = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

WORDS = ["r1_zero", "supervised", "name", "kind", "sft", "steps", "lr", "on", "1e-5", "None", "", "a:b", "[key]", "0"]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.floats(), st.sampled_from(WORDS), st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    recipe = load_recipe(Path(__file__).resolve().parents[2] / "recipes" / "luffy_sft.yaml")
    return recipe.model_dump(mode="json")


def judged(path: Path, overrides: list[str]) -> str | None:
    try:
        load_recipe(path, overrides)
    except UserError as error:
        sentences = str(error).split("\n")
        assert len(set(sentences)) == len(sentences) <= MOST + 1
        for sentence in sentences:
            assert len(sentence) > 10
            assert "Input should" not in sentence and "literal[" not in sentence, "pydantic's own words"
        return str(error)
    return None


def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    steps = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [(*path, key) for key, _ in steps] + [below for key, inner in steps for below in paths(inner, (*path, key))]


@quick
@given(data=st.data())
def test_any_value_anywhere(data: st.DataObject, resolved: dict[str, Any], tmp_path: Path) -> None:
    import copy

    changed = copy.deepcopy(resolved)
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(paths(changed)))
        target = changed
        for step in way:
            target = target[step]
        target[last] = data.draw(values)
    path = tmp_path / "r.yaml"
    path.write_text(write(changed), encoding="utf-8")
    judged(path, [])


@quick
@given(data=st.data())
def test_any_slip_of_the_keyboard(data: st.DataObject, tmp_path: Path) -> None:
    text = TEXT
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 3))
        text = text[:place] + data.draw(st.text("\t :-{}[]'\"#&*!|>%@`,?ab0\n", max_size=3)) + text[place + gone :]
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    judged(path, [])


@quick
@given(data=st.data())
def test_any_override(data: st.DataObject, resolved: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(TEXT, encoding="utf-8")
    overrides = []
    for _ in range(data.draw(st.integers(1, 2))):
        way = [str(step) for step in data.draw(st.sampled_from(paths(resolved)))]
        way = way[: data.draw(st.integers(1, len(way)))] + data.draw(st.lists(st.sampled_from(WORDS), max_size=1))
        overrides.append(".".join(way) + "=" + data.draw(st.sampled_from([*WORDS, "{}", "[]", "{a", "[1, {b: 2}]"])))
    judged(path, overrides)
