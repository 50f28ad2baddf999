"""The four rewards of the pipeline with working-out tags. `variant` picks Lemma's scores or one of two originals.

lemma: exact +3; approximate -3 to +1.5; answer -2 to +5; numbers -1.5 to +3; all four -6.5 to +12.5.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from lemma.rewards.base import Reward, RewardInput
from lemma.rewards.correctness import need_gold

Variant = Literal["lemma", "notebook", "repository"]
START, END, OPEN, CLOSE = "<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>"
_BLOCK = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)
_WHOLE = re.compile(rf"{START}.*?{END}{OPEN}.*?{CLOSE}", re.DOTALL)


def _notebook(text: str, eos: str) -> str | None:
    """The solution as the notebook's pattern finds it, at the end of a line."""
    end = rf"{re.escape(CLOSE)}[\s]{{0,}}(?:{re.escape(eos)})?" if eos else rf"{re.escape(CLOSE)}[\s]{{0,}}"
    found = re.search(rf"{END}.*?{OPEN}(.+?){end}[\s]{{0,}}$", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else None


def _lemma(text: str, eos: str) -> bool:
    """Working out ends, then comes one solution, then nothing but white space."""
    text = text.removesuffix(eos) if eos else text
    return re.fullmatch(rf"(?:\s*{START})?.*?{END}\s*{OPEN}.+?{CLOSE}\s*", text, re.DOTALL) is not None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _near(given: float, wanted: float, tenth: float, fifth: float) -> float | None:
    """The score of a number within ten or twenty per cent."""
    share = given / wanted
    if 0.9 <= share <= 1.1:
        return tenth
    return fifth if 0.8 <= share <= 1.2 else None


class WorkingOutReward(Reward):
    """What the four have in common."""

    variant: Variant = "lemma"
    """Whose scores: lemma, notebook (Unsloth's) or repository."""
    eos: str = "<|endoftext|>"
    """The end-of-sequence text that may follow the solution."""


class ExactFormat(WorkingOutReward):
    """The whole format is kept: 3 points."""

    name: Literal["exact_format"] = "exact_format"
    """Which reward."""

    def score(self, item: RewardInput) -> float | None:
        if self.variant == "notebook":
            return 3.0 * (_notebook(item.completion, self.eos) is not None)
        if self.variant == "repository":
            return 3.0 * (_WHOLE.search(item.completion) is not None)
        return 3.0 * _lemma(item.completion, self.eos)


class ApproximateFormat(WorkingOutReward):
    """Half a point for each of three tags that occurs exactly once, otherwise one point off."""

    name: Literal["approximate_format"] = "approximate_format"
    """Which reward."""

    def score(self, item: RewardInput) -> float | None:
        return sum(0.5 if item.completion.count(tag) == 1 else -1.0 for tag in (END, OPEN, CLOSE))


class Answer(WorkingOutReward):
    """How near the solution is: 5 points for the right one, part of them near by."""

    name: Literal["answer"] = "answer"
    """Which reward."""

    needs_verdict: ClassVar[bool] = True

    def score(self, item: RewardInput) -> float | None:
        if self.variant == "notebook":
            return self._notebook(item.completion, need_gold(item, self.name))
        block = _BLOCK.search(item.completion)
        if self.variant == "repository":
            return self._repository(block[1].strip() if block else None, need_gold(item, self.name))
        if not item.verdict.known:
            return None
        if block is None or not block[1].strip():
            return -2.0
        if item.verdict.right:
            return 5.0
        given, wanted = _number(block[1].strip()), _number(item.problem.gold or "")
        near = _near(given, wanted, 2.0, 1.5) if given is not None and wanted else None
        return -1.5 if near is None else near

    def _notebook(self, text: str, gold: str) -> float:
        given = _notebook(text, self.eos)
        if given is None:
            return -2.0
        if given == gold:
            return 5.0
        if given.strip() == gold.strip():
            return 3.5
        first, second = _number(given), _number(gold)
        if first is None or second is None or second == 0:
            return -4.5
        near = _near(first, second, 2.0, 1.5)
        return -2.5 if near is None else near

    def _repository(self, given: str | None, gold: str) -> float:
        if given is None:
            return -2.0
        if given == gold:
            return 5.0
        if given.replace(" ", "") == gold.replace(" ", ""):
            return 3.5
        first, second = _number(given), _number(gold)
        if first is None or second is None:
            return -2.5
        if second == 0:
            return 5.0 if first == 0 else -2.5
        near = _near(first, second, 2.0, 1.5)
        return -2.5 if near is None else near


class Numbers(WorkingOutReward):
    """How near the first number of the solution is to the gold."""

    name: Literal["numbers"] = "numbers"
    """Which reward."""

    def score(self, item: RewardInput) -> float | None:
        gold = need_gold(item, self.name)
        if self.variant == "notebook":
            return self._notebook(item.completion, gold)
        block = _BLOCK.search(item.completion)
        text = block[1] if block else ""
        found = re.search(r"-?\d+\.?\d*", text if self.variant == "repository" else text.replace(",", ""))
        wanted = _number(gold.strip()) if self.variant == "repository" else _number(gold.strip().replace(",", ""))
        if found is None or wanted is None:
            return -1.5
        given = float(found[0])
        best, tenth, fifth, wrong = (4.0, 2.5, 1.5, -2.0) if self.variant == "repository" else (3.0, 1.5, 0.5, -1.0)
        if abs(given - wanted) < 1e-6:
            return best
        near = _near(given, wanted, tenth, fifth) if wanted else None
        return wrong if near is None else near

    def _notebook(self, text: str, gold: str) -> float:
        found = re.search(rf"{OPEN}.*?([-]?[\d\.\,]{{1,}})", text, re.MULTILINE | re.DOTALL)
        if found is None:
            return -2.5
        wanted = _number(gold.strip())
        given = _number(found[1].strip().replace(",", ""))
        if wanted is None or given is None:
            return 0.0
        return 3.5 if given == wanted else -1.5
