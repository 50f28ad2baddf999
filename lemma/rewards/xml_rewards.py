"""The five graded rewards of GRPO on GSM8K with XML tags: correctness, integer, strict and soft format, tag count."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput

_STRICT = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
_SOFT = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"


def xml_answer(text: str) -> str:
    """The text after the last opening answer tag and before the next closing one; without tags, the whole text."""
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


class Correctness(Reward):
    """A right answer, 2 points."""

    name: Literal["correctness"] = "correctness"
    """Which reward."""
    right: float = 2.0
    """Value of a right answer."""
    compat: bool = False
    """Compare as strings, as the original does: 1,234 is then not 1234."""

    needs_verdict: ClassVar[bool] = True

    def score(self, item: RewardInput) -> float | None:
        if self.compat:
            return self.right * (xml_answer(item.completion) == item.problem.gold)
        return self.right * item.verdict.right if item.verdict.known else None


class Integer(Reward):
    """The answer, between its tags, is written with digits only."""

    name: Literal["integer"] = "integer"
    """Which reward."""
    value: float = 0.5
    """Value of an answer written with digits only."""
    compat: bool = False
    """Take the text from its last opening tag to the end, or the whole text, where a tag is missing, as the original
    does."""

    def score(self, item: RewardInput) -> float | None:
        _, tag, behind = item.completion.rpartition("<answer>")
        is_tagged = bool(tag) and "</answer>" in behind
        return self.value * ((self.compat or is_tagged) and xml_answer(item.completion).isdigit())


class StrictFormat(Reward):
    """Every tag on a line of its own, nothing before, between or after."""

    name: Literal["strict_format"] = "strict_format"
    """Which reward."""
    value: float = 0.5
    """Value of a completion that follows the format."""
    compat: bool = False
    """Let the pattern's dot not match newlines, as in many copies of the original."""

    def score(self, item: RewardInput) -> float | None:
        return self.value * (re.match(_STRICT, item.completion, 0 if self.compat else re.DOTALL) is not None)


class SoftFormat(Reward):
    """Both pairs of tags from the start of the text, with any white space between them."""

    name: Literal["soft_format"] = "soft_format"
    """Which reward."""
    value: float = 0.5
    """Value of a completion that follows the format."""
    compat: bool = False
    """Let the pattern's dot not match newlines, as in many copies of the original."""

    def score(self, item: RewardInput) -> float | None:
        return self.value * (re.match(_SOFT, item.completion, 0 if self.compat else re.DOTALL) is not None)


class TagCount(Reward):
    """An eighth for each of the four tags that occurs exactly once on its own line, minus a little for text after the
    end."""

    name: Literal["tag_count"] = "tag_count"
    """Which reward."""
    value: float = 0.125
    """Value of each tag."""
    penalty: float = 0.001
    """Subtracted twice for each character after the closing tag."""
    compat: bool = False
    """If the final newline is missing, penalise the length of the whole text, as the original does."""

    def score(self, item: RewardInput) -> float | None:
        text, total = item.completion, 0.0
        total += self.value * (text.count("<reasoning>\n") == 1)
        total += self.value * (text.count("\n</reasoning>\n") == 1)
        if text.count("\n<answer>\n") == 1:
            total += self.value - self.penalty * self._after(text, "\n</answer>\n")
        if text.count("\n</answer>") == 1:
            total += self.value - self.penalty * (self._after(text, "\n</answer>") - 1)
        return total

    def _after(self, text: str, tag: str) -> int:
        """Characters after the last such tag; the caller of the second one disregards its final newline."""
        if self.compat or tag in text:
            length = len(text.split(tag)[-1])
            return length if self.compat or tag.endswith("\n") or length else 1
        after = text.rpartition("\n</answer>")
        return len(after[2]) if after[1] else 0
