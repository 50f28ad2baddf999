"""Questions to workers: what is asked, what results are cached by, and the message that is sent."""

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
"""A response in which every grader of another system that can take long finds a plain number to compare."""


@dataclass(frozen=True, slots=True)
class CompatTask:
    """A question to a grader of another system."""

    name: str
    response: str
    gold: str | tuple[str, ...]
    compat: bool


@dataclass(slots=True)
class GradingTask:
    question: PendingGrade | CompatTask
    future: Future[Any] = field(default_factory=Future)
    lost: int = 0
    """How many workers went away while they had this task, for a reason that was not its own."""
    seconds: float = 0.0
    """How long a worker was at it, without the time that it waited for one."""

    @property
    def unknown(self) -> Any:
        """The outcome where the grader is at fault; it is never cached."""
        return ("unknown", "grader") if isinstance(self.question, PendingGrade) else None


def key_of(question: PendingGrade | CompatTask) -> Hashable:
    """What results are cached by: the gold, the answer and the rules."""
    return (question.gold, question.answer, question.rules) if isinstance(question, PendingGrade) else question


def message_of(question: PendingGrade | CompatTask) -> dict[str, Any]:
    if isinstance(question, CompatTask):
        return {"op": "compat", **asdict(question)}
    return {"op": "settle", "gold": question.gold, "answer": question.answer, "rules": question.rules.model_dump()}
