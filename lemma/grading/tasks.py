"""Tasks for workers: their content, their cache key, and the message that is sent."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from lemma.grading.grader import PendingGrade

PROBE = (
    "\\boxed{987654321} </think> <answer>\\boxed{987654321}</answer> "
    "Final Answer: The final answer is 987654321. I hope it is correct."
)
"""A response in which every potentially slow grader of another system finds a plain number to compare."""


@dataclass(frozen=True, slots=True)
class CompatTask:
    """A task for another system's grader."""

    name: str
    response: str
    gold: str | tuple[str, ...]
    compat: bool


@dataclass(slots=True)
class GradingTask:
    question: PendingGrade | CompatTask
    future: Future[Any] = field(default_factory=Future)
    seconds: float = 0.0
    """How long a worker took, not counting the wait for one."""

    @property
    def unknown(self) -> Any:
        """The outcome if the grader is at fault; it is never cached."""
        return ("unknown", "grader") if isinstance(self.question, PendingGrade) else None


def key_of(question: PendingGrade | CompatTask) -> Hashable:
    """The cache key: the gold, the answer and the rules."""
    return (question.gold, question.answer, question.rules) if isinstance(question, PendingGrade) else question


def message_of(question: PendingGrade | CompatTask) -> dict[str, Any]:
    if isinstance(question, CompatTask):
        return {"op": "compat", **asdict(question)}
    return {"op": "settle", "gold": question.gold, "answer": question.answer, "rules": question.rules.model_dump()}
