"""Graders of other systems, selectable by name, each equal to its original on the stored reference rows.

They exist for numbers comparable with those systems. What is marked as a defect of an original is reproduced under
`compat=True` and repaired otherwise. All of them are pure functions of strings; those that call math-verify belong in a
worker, which `GradingService.compat` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lemma.grading.compat import boxed_grader, luffy_rewards, verifiers

Grader = Callable[..., Any]


def _luffy(version: int) -> Grader:
    def score(response: str, gold: Any, compat: bool = True) -> float:
        return luffy_rewards.luffy_score(response, gold, version, compat)

    return score


def _verifier(name: str) -> Grader:
    def score(response: str, gold: str, compat: bool = True) -> float:
        if name == "gsm8k":
            return verifiers.gsm8k(response, gold, signed=not compat)
        return verifiers.VERIFIERS[name](response, gold)

    return score


def _paced(function: Grader, fast: bool) -> Grader:
    def score(response: str, gold: Any, compat: bool = True) -> Any:
        return function(response, gold, fast, compat)

    return score


COMPAT: dict[str, Grader] = {
    "r1_zero_fast": _paced(boxed_grader.r1_zero, True),
    "r1_zero_slow": _paced(boxed_grader.r1_zero, False),
    "question_only_fast": _paced(boxed_grader.question_only, True),
    "question_only_slow": _paced(boxed_grader.question_only, False),
    "boxed_fast": _paced(boxed_grader.boxed_score, True),
    "boxed_slow": _paced(boxed_grader.boxed_score, False),
    "gsm8k_source": lambda response, gold, compat=True: luffy_rewards.gsm8k_source(response, gold),
    "math_source": lambda response, gold, compat=True: luffy_rewards.math_source(response, gold),
    **{f"luffy_v{version}": _luffy(version) for version in range(5)},
    "math_verify": _luffy(4),
    **{f"verifier_{name}": _verifier(name) for name in verifiers.VERIFIERS},
}
