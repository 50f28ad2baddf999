"""The rewards of the pipeline with working-out tags: the originals' patterns in linear time."""

from __future__ import annotations

import random
import re
import time

import pytest

from lemma.core.types import Message, Problem
from lemma.rewards import RewardInput, make_reward
from lemma.rewards import working_out as rewards

START, END, OPEN, CLOSE = "<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>"
NAMES = ["exact_format", "approximate_format", "answer", "numbers"]


def item(completion: str, gold: str = "5") -> RewardInput:
    return RewardInput(completion, Problem((Message("user", "2+3?"),), (gold,)))


def by_pattern(text: str, eos: str) -> tuple[str | None, bool, str | None, str | None]:
    """What the originals' regular expressions find: notebook, repository, the first block, the first number."""
    perhaps = rf"(?:{re.escape(eos)})?" if eos else ""
    notebook = re.search(rf"{END}.*?{OPEN}(.+?){CLOSE}\s*{perhaps}\s*$", text, re.MULTILINE | re.DOTALL)
    block = re.search(rf"{OPEN}(.*?){CLOSE}", text, re.DOTALL)
    number = re.search(rf"{OPEN}.*?([-]?[\d\.\,]{{1,}})", text, re.MULTILINE | re.DOTALL)
    whole = re.search(rf"{START}.*?{END}{OPEN}.*?{CLOSE}", text, re.DOTALL) is not None
    return notebook and notebook[1], whole, block and block[1], number and number[1]


@pytest.mark.parametrize("eos", ["", "<eos>", "\n<eos>", "<eos>\n", " ", CLOSE])
def test_tags_are_found_as_by_the_patterns_of_the_originals(eos: str) -> None:
    draw = random.Random(f"working out {eos}")
    pieces = [START, END, OPEN, CLOSE, END + OPEN, "<eos>", "a", "-5", "6.", " ", "\n", "\r", "\x1c", "<", "<SOLUTION"]
    found = 0
    for _ in range(8000):
        text = "".join(draw.choices(pieces, k=draw.randrange(13)))
        number = rewards._NUMBER.search(text.partition(OPEN)[2])
        got = rewards._notebook(text, eos), rewards._whole(text), rewards._block(text), number and number[0]
        assert got == by_pattern(text, eos), text
        found += got[0] is not None
    assert found > 100


@pytest.mark.parametrize("variant", ["notebook", "repository"])
@pytest.mark.parametrize(
    "text",
    [
        START + (END + OPEN) * 4000,
        END + OPEN + ("a" + CLOSE + " ") * 8000 + "b",
        END + OPEN + "5" + CLOSE + " " * 60000 + "b",
    ],
    ids=["never closed", "never at the end", "spaces"],
)
def test_scoring_takes_time_in_proportion_to_the_text(variant: str, text: str) -> None:
    begin = time.perf_counter()
    for name in NAMES:
        make_reward({"name": name, "variant": variant}).score(item(text))
    assert time.perf_counter() - begin < 2
