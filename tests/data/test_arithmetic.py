from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pytest

from lemma.core.errors import UserError
from lemma.data.arithmetic import VOCABULARY, generate, parse, solution, split_of
from lemma.data.data_options import ArithmeticOptions


def evaluate(expression: str) -> int:
    """Work out `13 + 9 / 2` from left to right, by rules written here and not in the package."""
    first, *rest = expression.split(" ")
    total = int(first)
    for sign, amount in zip(rest[::2], map(int, rest[1::2]), strict=True):
        if sign == "/":
            assert total % amount == 0, expression
        total = {"+": total + amount, "-": total - amount, "*": total * amount, "/": total // amount}[sign]
        assert 0 <= total <= 99, expression
    return total


def check_solution(text: str, start: int, answer: str) -> None:
    lines = [line.split(" = ") for line in text.split(" ; ")]
    assert lines[0][0].split(" ")[0] == str(start)
    for chain, result in lines:
        assert evaluate(chain) == int(result), text
    for (_, result), (chain, _) in pairwise(lines):
        assert chain.split(" ")[0] == result, text
    assert lines[-1][1] == answer


@pytest.mark.parametrize("style", ["stepwise", "terse", "mixed", "skipping"])
@pytest.mark.parametrize(("operations", "largest"), [(1, 10), (6, 30), (20, 99)])
def test_every_solution_is_right(style, operations, largest):
    options = ArithmeticOptions(operations=operations, largest=largest, style=style)
    for item in generate(options, "train", count=150):
        start, steps = parse(item.problem.question)
        assert len(steps) == operations and 3 <= start <= 15
        assert all(0 <= step.total <= largest for step in steps)
        assert all(2 <= step.amount <= 9 for step in steps)
        check_solution(item.reasoning, start, item.answer)
        assert item.problem.golds == (item.answer,) and item.problem.level == str(operations)


def test_styles_differ_as_they_say():
    problems = [item.problem for item in generate(ArithmeticOptions(), "train", count=1000)]
    stepwise, terse, mixed, skipping = (
        [solution(problem, style) for problem in problems] for style in ("stepwise", "terse", "mixed", "skipping")
    )
    assert all(text.count("=") == 6 for text in stepwise)
    assert all(text.count("=") == 1 for text in terse)
    share = sum(a == b for a, b in zip(mixed, terse, strict=True)) / len(problems)
    assert 0.55 < share < 0.65
    assert all(a in (b, c) for a, b, c in zip(mixed, terse, stepwise, strict=True))
    written = Counter(text.count("=") for text in skipping)
    assert set(written) == set(range(1, 7)) and written.most_common(2)[0][0] in (3, 4)


def test_a_question_that_asks_how_gets_every_step():
    options = ArithmeticOptions(style="skipping", written=0.2, asked_how=0.3)
    items = generate(options, "train", count=1000)
    asked = [item for item in items if item.problem.question.endswith(" how many ? how ?")]
    others = [item for item in items if item.problem.question.endswith(" . how many ?")]
    assert len(asked) + len(others) == 1000 and 250 < len(asked) < 350
    assert all(item.reasoning.count("=") == 6 for item in asked)
    assert all(item.problem.id.endswith("/how") for item in asked), "another question, another id"
    assert 0.17 < sum(item.reasoning.count("=") - 1 for item in others) / (5 * len(others)) < 0.23
    plain = generate(ArithmeticOptions(), "train", count=1000)
    assert {item.problem.id for item in items} & {item.problem.id for item in plain} == {
        item.problem.id for item in others
    }
    assert [parse(item.problem.question) for item in items] == [parse(item.problem.question) for item in plain]


def test_a_problem_depends_only_on_seed_split_and_number():
    options = ArithmeticOptions(seed=3)
    whole = generate(options, "train", count=60)
    assert generate(options, "train", start=20, count=40) == whole[20:]
    assert generate(options, "train", start=59, count=1) == whole[59:]
    assert generate(options.model_copy(update={"seed": 4}), "train", count=60) != whole


def test_the_first_problem_is_this_one():
    item = generate(ArithmeticOptions(style="stepwise"), "train", count=1)[0]
    assert (
        item.problem.question == "mia has 8 stones . buys 6 . buys 6 . wins 2 . buys 5 . loses 8 . gives 3 . how many ?"
    )
    assert item.answer == "16"


def test_splits_share_nothing_for_any_seed():
    """With one operation there are few problems, so seeds overlap heavily inside a split: the hash must hold."""
    seen: dict[str, set[tuple[int, tuple]]] = {"train": set(), "test": set(), "validation": set()}
    for seed in range(5):
        for split, found in seen.items():
            options = ArithmeticOptions(operations=1, largest=20, seed=seed)
            for item in generate(options, split, count=200):
                start, steps = parse(item.problem.question)
                found.add((start, tuple(steps)))
                assert split_of(start, steps) == split
    assert all(len(found) > 40 for found in seen.values())
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["test"] & seen["validation"]


def test_wording_does_not_change_the_split():
    start, steps = parse("eva has 13 pens . buys 9 . halves . how many ?")
    again, same = parse("tom has 13 cups . finds 9 . halves . how many ?")
    assert (start, steps) == (again, same) and split_of(start, steps) == split_of(again, same)
    assert steps[-1].total == 11


def test_the_vocabulary_is_closed_and_all_used():
    assert len(set(VOCABULARY)) == len(VOCABULARY) <= 160
    used: set[str] = set()
    for style in ("stepwise", "skipping"):
        for item in generate(ArithmeticOptions(operations=12, largest=99, style=style), "train", count=1500):
            used |= set(item.problem.question.split(" ")) | set(item.reasoning.split(" ")) | {item.answer}
    assert used == set(VOCABULARY)


def test_totals_are_spread_out():
    totals = Counter(int(item.answer) for item in generate(ArithmeticOptions(), "test", count=3000))
    assert set(totals) == set(range(31))
    assert max(totals.values()) < 0.08 * 3000


def test_it_is_fast_enough_for_the_demo():
    started = time.process_time()
    items = generate(ArithmeticOptions(), "train", count=5000)
    assert time.process_time() - started < 2.0
    assert len({item.problem.id for item in items}) == 5000


def test_an_unknown_split_is_named():
    with pytest.raises(UserError, match="no split 'tests'; did you mean 'test'"):
        generate(ArithmeticOptions(), "tests")
