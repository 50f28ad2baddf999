"""Rewards for think and answer tags: r1_zero, the think format, the soft and the strict pair of tags."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from lemma.grading import default_service
from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput

_R1_ZERO = re.compile(r"</think>\s*<answer>.*</answer>", re.DOTALL)
_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_SOFT = re.compile(r".*?</think>\s*<answer>.*?</answer>", re.DOTALL)
_PAIR = r"^<think>.*?</think>\s*<answer>.*?</answer>$"


class R1ZeroReward(Reward):
    """1 if the tags are right and the answer too, `format_value` if only the tags are right, else 0."""

    name: Literal["r1_zero"] = "r1_zero"
    """Which reward."""
    format_value: float = 0.0
    """Value of right tags with a wrong answer."""
    compat: bool = False
    """The original to the letter: one space between the tags, text after `</answer>` graded, its own fast grader."""

    needs_verdict: ClassVar[bool] = True
    leaves_out: ClassVar[bool] = True

    def score(self, item: RewardInput) -> float | None:
        if self.compat:
            golds = list(item.problem.golds)
            if not golds:
                return None
            service = item.service or default_service()
            score = service.compat("r1_zero_fast", item.completion, golds, True)
            return None if score is None else float(score["reward"] or self.format_value * score["format_reward"])
        if item.verdict.kind == "unknown":
            return None
        if not _R1_ZERO.search(item.completion):
            return 0.0
        return 1.0 if item.verdict.kind == "right" else self.format_value


class ThinkFormat(Reward):
    """The text begins with one `<think>`, which is closed."""

    name: Literal["think_format"] = "think_format"
    """Which reward."""
    value: float = 1.0
    """Value of a completion that follows the format."""
    opened: bool = False
    """The prompt already ends with `<think>`, so the completion does not repeat it."""

    def score(self, item: RewardInput) -> float | None:
        text = "<think>" + item.completion if self.opened else item.completion
        return self.value * (_THINK.match(text) is not None)


class ThinkAnswerFormat(Reward):
    """`<think>...</think>` then `<answer>...</answer>` and nothing else."""

    name: Literal["think_answer_format"] = "think_answer_format"
    """Which reward."""
    value: float = 1.0
    """Value of a completion that follows the format."""
    soft: bool = False
    """Allow a missing opening tag and text after the answer."""
    compat: bool = False
    """Let the pattern's dot not match newlines, as in the original."""

    def score(self, item: RewardInput) -> float | None:
        if self.soft:
            return self.value * (_SOFT.match(item.completion) is not None)
        return self.value * (re.match(_PAIR, item.completion, 0 if self.compat else re.DOTALL) is not None)
