"""The rewards of the pipeline with working-out tags: whose tags, which solution, and in linear time."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import numpy as np
import pytest

from lemma.core.types import Message, Problem
from lemma.formats import make_format
from lemma.formats.working_out import WorkingOut
from lemma.rewards import RewardInput, make_reward
from lemma.rewards import working_out_rewards as rewards
from lemma.rollouts.episode import Episode
from lemma.rollouts.scorer import Scorer
from tests.formats.tokenizers_made_here import make_tokenizer

START, END, OPEN, CLOSE = "<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>"
USUAL = WorkingOut()
OTHER = {"name": "working_out", "start": "(work", "end": "work)", "solution_start": "[.*", "solution_end": "*.]"}
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
        notebook, tags = rewards._notebook(text, eos, USUAL), (text, USUAL)
        got = notebook, rewards._whole(*tags), rewards._block(*tags), number and number[0]
        assert got == by_pattern(text, eos), text
        found += got[0] is not None
    assert found > 100


@pytest.mark.parametrize("variant", ["lemma", "notebook", "repository"])
@pytest.mark.parametrize(
    "text",
    [
        START + (END + OPEN) * 1000,
        END + OPEN + ("a" + CLOSE + " ") * 8000 + "b",
        END + OPEN + "5" + CLOSE + " " * 60000 + "b",
    ],
    ids=["never closed", "never at the end", "spaces"],
)
def test_scoring_takes_time_in_proportion_to_the_text(variant: str, text: str) -> None:
    begin = time.process_time()
    for name in NAMES:
        make_reward({"name": name, "variant": variant}).score(item(text))
    assert time.process_time() - begin < 2


def judged(format: dict[str, Any] | str, text: str, variant: str) -> list[float | None]:
    """The four rewards of a sampled text, as a run scores it."""
    tokenizer, none = make_tokenizer(), np.zeros(0)
    chosen = [make_reward({"name": name, "variant": variant}) for name in NAMES]
    scorer = Scorer(make_format(format), chosen, tokenizer)
    sample = Episode.at_once(("p",), 0, "p", none, np.array(tokenizer.encode(text)), none, none, "stop")
    scored = scorer.finish([scorer.begin(item(text).problem, sample)])[0]
    return [scored.rewards[name] for name in NAMES]


@pytest.mark.parametrize("variant", ["lemma", "notebook", "repository"])
def test_the_tags_are_those_of_the_format(variant: str) -> None:
    """What is right and what is wrong has the same worth whatever the tags are called."""
    tags = [OTHER[key] for key in ("start", "end", "solution_start", "solution_end")]
    for text in (f"{START}2+3{END}{OPEN}5{CLOSE}", f"{START}2+3{END}{OPEN}5.2{CLOSE}", f"2+3{OPEN}5{CLOSE}", "5"):
        other = text
        for usual, tag in zip((START, END, OPEN, CLOSE), tags, strict=True):
            other = other.replace(usual, tag)
        assert judged(OTHER, other, variant) == judged("working_out", text, variant), text
    best = {"lemma": 12.5, "notebook": 13.0, "repository": 13.5}[variant]
    assert sum(value or 0 for value in judged(OTHER, "(work 2+3work)[.*5*.]", variant)) == best
    assert sum(value or 0 for value in judged(OTHER, f"{START}2+3{END}{OPEN}5{CLOSE}", variant)) < -6


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        (f"maybe {OPEN}5{CLOSE} no{END}{OPEN}6{CLOSE}", [0.0, -1.5, 1.5, 0.5]),
        (f"maybe {OPEN}6{CLOSE} no{END}{OPEN}5{CLOSE}", [0.0, -1.5, 5.0, 3.0]),
        (f"a{END}{OPEN}5{CLOSE}{OPEN}9{CLOSE}", [0.0, -1.5, -1.5, -1.0]),
        (f"a{END}{OPEN}9{CLOSE} or {OPEN}5{CLOSE}", [0.0, -1.5, 5.0, 3.0]),
        (f"a{OPEN}5{CLOSE}", [0.0, 0.0, -2.0, -1.5]),
        (f"a{OPEN}5{CLOSE}{END}", [0.0, 1.5, -2.0, -1.5]),
        (f"a{END}{CLOSE}5{OPEN}", [0.0, 1.5, -2.0, -1.5]),
        (f"a{END}b{END}{OPEN}5{CLOSE}", [0.0, 0.0, 5.0, 3.0]),
        (f"a{END}b{OPEN}5{CLOSE}", [0.0, 1.5, 5.0, 3.0]),
        (f"a{END}{OPEN} {CLOSE}", [0.0, 1.5, -2.0, -1.5]),
        (f" {START}a{END}\n{OPEN}\n5 {CLOSE}\n<|endoftext|>", [3.0, 1.5, 5.0, 3.0]),
    ],
)
def test_all_four_score_the_solution_that_is_graded(text: str, worth: list[float]) -> None:
    """By hand: exact, approximate, answer, numbers; the last solution after the working out is the one that counts."""
    assert judged("working_out", text, "lemma") == worth
    direct = RewardInput(text, item("").problem, USUAL.parse(text))
    assert [make_reward(name).score(direct) for name in NAMES] == worth
    assert [make_reward(name).score(item(text)) for name in (NAMES[0], NAMES[1], NAMES[3])] == [*worth[:2], worth[3]]
