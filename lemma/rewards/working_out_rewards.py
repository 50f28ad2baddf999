"""The four rewards of the pipeline with working-out tags. `variant` picks Lemma's scores or one of two originals.

The tags are those of the recipe's format, if it is working_out.
lemma: exact +3; approximate -3 to +1.5; answer -2 to +5; numbers -1.5 to +3; all four -6.5 to +12.5.
"""

from __future__ import annotations

import re
from functools import cache
from typing import ClassVar, Literal

from lemma.formats.working_out import WorkingOut
from lemma.rewards.correctness import need_gold
from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput

Variant = Literal["lemma", "notebook", "repository"]
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?[\d.,]+")


@cache
def _usual() -> WorkingOut:
    return WorkingOut()


def _tags(item: RewardInput) -> WorkingOut:
    return item.format if isinstance(item.format, WorkingOut) else _usual()


def _block(text: str, tags: WorkingOut) -> str | None:
    """The text between the first opening tag of a solution and the next closing tag."""
    _, opened, rest = text.partition(tags.solution_start)
    block, closed, _ = rest.partition(tags.solution_end)
    return block if opened and closed else None


def _whole(text: str, tags: WorkingOut) -> bool:
    """Working out between its tags, directly followed by a solution between its own: the repository's regex, in linear
    time."""
    for tag in (tags.start, tags.end + tags.solution_start, tags.solution_end):
        _, found, text = text.partition(tag)
        if not found:
            return False
    return True


def _notebook(text: str, eos: str, tags: WorkingOut) -> str | None:
    """The solution as the notebook's pattern finds it, at the end of a line, in linear time.

    The pattern is END.*?OPEN(.+?)CLOSE, white space, perhaps EOS, white space, end of a line. If later tags match, so
    do the first END and the first OPEN after it, so only the closing tag has to be searched for.
    """
    opening, closing = tags.solution_start, tags.solution_end
    end = text.find(tags.end)
    start = text.find(opening, end + len(tags.end)) if end >= 0 else -1
    if start < 0:
        return None
    start += len(opening)
    close = text.find(closing, start + 1)
    while close >= 0:
        if _ends_line(text, close + len(closing), eos):
            return text[start:close]
        close = text.find(closing, close + 1)
    return None


def _ends_line(text: str, place: int, eos: str) -> bool:
    """Whether only white space and perhaps one EOS lie between this position and the end of a line."""
    rest = _after_space(text, place)
    if rest is None:
        return True
    begin = rest - (len(eos) - len(eos.lstrip()))
    if not eos.strip() or begin < place or not text.startswith(eos, begin):
        return False
    return _after_space(text, begin + len(eos)) is None


def _after_space(text: str, place: int) -> int | None:
    """Where the white space at this position ends; None if a line ends within it."""
    found = _SPACE.match(text, place)
    assert found is not None
    return None if found.end() == len(text) or "\n" in found[0] else found.end()


def _lemma(text: str, eos: str, tags: WorkingOut) -> bool:
    """Working out ends once, then comes one solution, then nothing but white space."""
    text = text.removesuffix(eos) if eos else text
    if any(text.count(tag) != 1 for tag in (tags.end, tags.solution_start, tags.solution_end)):
        return False
    ended = text.index(tags.end) + len(tags.end)
    start, close = text.index(tags.solution_start), text.index(tags.solution_end)
    solution = text[start + len(tags.solution_start) : close]
    around = text[ended:start] + text[close + len(tags.solution_end) :]
    return ended <= start and bool(solution.strip()) and not around.strip()


def _answer(item: RewardInput) -> str | None:
    """The solution that is graded."""
    parsed = _tags(item).parse(item.completion) if item.parsed is None else item.parsed
    return parsed.answer


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
    """3 points if the completion follows the whole format."""

    name: Literal["exact_format"] = "exact_format"
    """Which reward."""

    def score(self, item: RewardInput) -> float | None:
        text, tags = item.completion, _tags(item)
        if self.variant == "notebook":
            return 3.0 * (_notebook(text, self.eos, tags) is not None)
        return 3.0 * (_whole(text, tags) if self.variant == "repository" else _lemma(text, self.eos, tags))


class ApproximateFormat(WorkingOutReward):
    """Half a point for each of three tags that occurs exactly once, otherwise one point off."""

    name: Literal["approximate_format"] = "approximate_format"
    """Which reward."""

    def score(self, item: RewardInput) -> float | None:
        tags = _tags(item)
        wanted = (tags.end, tags.solution_start, tags.solution_end)
        return sum(0.5 if item.completion.count(tag) == 1 else -1.0 for tag in wanted)


class AnswerReward(WorkingOutReward):
    """How close the graded solution is: 5 points for the right one, some of them for a close one."""

    name: Literal["answer"] = "answer"
    """Which reward."""

    needs_verdict: ClassVar[bool] = True

    def score(self, item: RewardInput) -> float | None:
        if self.variant == "notebook":
            text = _notebook(item.completion, self.eos, _tags(item))
            return self._notebook(text, need_gold(item, self.name))
        if self.variant == "repository":
            block = _block(item.completion, _tags(item))
            return self._repository(None if block is None else block.strip(), need_gold(item, self.name))
        if not item.verdict.known:
            return None
        answer = _answer(item)
        if answer is None:
            return -2.0
        if item.verdict.right:
            return 5.0
        given, wanted = _number(answer), _number(item.problem.gold or "")
        near = _near(given, wanted, 2.0, 1.5) if given is not None and wanted else None
        return -1.5 if near is None else near

    def _notebook(self, given: str | None, gold: str) -> float:
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
    """How close the first number of the solution is to the gold answer."""

    name: Literal["numbers"] = "numbers"
    """Which reward."""

    @property
    def needs_gold(self) -> bool:
        return True

    def score(self, item: RewardInput) -> float | None:
        gold, tags = need_gold(item, self.name), _tags(item)
        if self.variant == "notebook":
            return self._notebook(item.completion.partition(tags.solution_start)[2], gold)
        if self.variant == "repository":
            text, wanted = _block(item.completion, tags) or "", _number(gold.strip())
        else:
            text, wanted = (_answer(item) or "").replace(",", ""), _number(gold.strip().replace(",", ""))
        match = re.search(r"-?\d+\.?\d*", text)
        if match is None or wanted is None:
            return -1.5
        given = float(match[0])
        best, tenth, fifth, wrong = (4.0, 2.5, 1.5, -2.0) if self.variant == "repository" else (3.0, 1.5, 0.5, -1.0)
        if abs(given - wanted) < 1e-6:
            return best
        near = _near(given, wanted, tenth, fifth) if wanted else None
        return wrong if near is None else near

    def _notebook(self, text: str, gold: str) -> float:
        match = _NUMBER.search(text)
        if match is None:
            return -2.5
        wanted = _number(gold.strip())
        given = _number(match[0].replace(",", ""))
        if wanted is None or given is None:
            return 0.0
        return 3.5 if given == wanted else -1.5
