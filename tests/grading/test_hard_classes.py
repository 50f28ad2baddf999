"""Each hard class: other spellings are right, near misses are wrong; so are whole completions."""

from __future__ import annotations

import pytest

from lemma.grading import grade
from tests.grading.hard_classes import HARD, Cases
from tests.grading.hard_completions import COMPLETIONS


def mistakes(cases: Cases, frames: tuple[str, ...]) -> list[str]:
    found = []
    for gold, rights, wrongs in cases:
        for kind, texts in (("right", [gold, *rights] if len(frames) > 1 else rights), ("wrong", wrongs)):
            for text in texts:
                for frame in frames:
                    verdict = grade(frame.replace("#", text), gold)
                    if verdict.kind != kind:
                        found.append(f"gold {gold!r}, prediction {frame.replace('#', text)!r}: {verdict}")
    return found


@pytest.mark.parametrize("name", HARD)
def test_spellings_and_near_misses(name: str) -> None:
    assert mistakes(HARD[name], (r"\boxed{#}", r"Thus it is $\boxed{#}$.", "<answer>#</answer>")) == []


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(name: str) -> None:
    assert mistakes(COMPLETIONS[name], ("#",)) == []


@pytest.mark.parametrize("name", [*HARD, *COMPLETIONS])
def test_each_class_has_enough_cases_of_both_kinds(name: str) -> None:
    cases = (HARD | COMPLETIONS)[name]
    assert sum(len(rights) + len(wrongs) for _, rights, wrongs in cases) >= 12
    assert sum(len(rights) for _, rights, _ in cases) >= 3 and sum(len(wrongs) for _, _, wrongs in cases) >= 3
