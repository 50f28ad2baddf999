"""Whether the answer is right, according to the grading service or another system's grader."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import field_validator

from lemma.core.errors import UserError, nearest
from lemma.grading import default_service
from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput


class Accuracy(Reward):
    """1 for a right answer, 0 for a wrong one; an unknown verdict gives no reward."""

    name: Literal["accuracy"] = "accuracy"
    """Which reward."""
    right: float = 1.0
    """Value of a right answer."""
    wrong: float = 0.0
    """Value of a wrong answer."""
    formatted: bool = False
    """Give the value of a right answer only if the completion follows the format."""

    needs_verdict: ClassVar[bool] = True

    def score(self, item: RewardInput) -> float | None:
        verdict = item.verdict
        if not verdict.known:
            return None
        kept = not self.formatted or (item.parsed is not None and item.parsed.ok)
        return self.right if verdict.right and kept else self.wrong


class FormatKept(Reward):
    """1 if the completion follows the recipe's format: there is an answer, and no doubt about which one it is."""

    name: Literal["format"] = "format"
    """Which reward."""
    value: float = 1.0
    """Value of a completion that follows the format; others get 0."""

    def score(self, item: RewardInput) -> float | None:
        return None if item.parsed is None else self.value * item.parsed.ok


class Graded(Reward):
    """The score of another system's grader, exactly as it computes it; see docs/grading.md for the names."""

    name: Literal["graded"] = "graded"
    """Which reward."""
    grader: str = "luffy_v3"
    """Name of the grader, such as luffy_v3, r1_zero_fast, boxed_slow, verifier_math."""
    compat: bool = True
    """Reproduce known defects of the original."""

    leaves_out: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return self.grader

    @field_validator("grader")
    @classmethod
    def _exists(cls, grader: str) -> str:
        from lemma.grading.compat import COMPAT

        if grader not in COMPAT:
            raise ValueError(f"there is no grader '{grader}'; {nearest(grader, COMPAT)}")
        return grader

    def score(self, item: RewardInput) -> float | None:
        golds = item.problem.golds
        if not golds:
            return None
        service = item.service or default_service()
        gold: Any = golds[0] if len(golds) == 1 else list(golds)
        score = service.compat(self.grader, item.completion, gold, self.compat)
        if score is None:
            return None
        if isinstance(score, dict):
            return float(score["reward"])
        return float(score[1]) if isinstance(score, list) else float(score)


def need_gold(item: RewardInput, reward: str) -> str:
    """The gold answer of an item, for rewards that need one."""
    if item.problem.gold is None:
        raise UserError(f"reward {reward} needs gold answers and problem {item.problem.id} has none")
    return item.problem.gold
