from __future__ import annotations

import json
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lemma.cli import main
from lemma.core.errors import LemmaWarning, UserError
from lemma.core.types import Demonstration, Message, Preference, Problem
from lemma.data.data_options import DataOptions, SourceOptions
from lemma.data.held_out import split_share
from lemma.data.load_rows import load_demonstrations, load_items, load_problems, row_of
from lemma.plugins.vary.marks import holds, numbers_in
from lemma.plugins.vary.roles import Unclear, plan_of
from lemma.plugins.vary.vary import ORIGIN, unmarked, vary, written
from tests.shared import shared


def row(question, working, answer, **more):
    return Demonstration(Problem((Message("user", question),), (answer,), **more), reasoning=working, answer=answer)


PENS = row(
    "Ira has 48 pens and gives 15 of them away. Each of the others is sold for $2.50. How much does he get?",
    "He keeps 48 - 15 = <<48-15=33>>33 pens.\nHe gets 33 x $2.50 = $<<33*2.5=82.50>>82.50.",
    "82.50",
)
SHIRT = row(
    "A shirt of $60 is 20% off. How much does it cost now?",
    "The discount is 60 * .20 = $<<60*.20=12>>12.\nIt costs 60 - 12 = $<<60-12=48>>48.",
    "48",
)
WEEK = row(
    "Noor reads 12 pages a day. How many pages does she read in 3 weeks?",
    "There are 3*7 = <<3*7=21>>21 days.\nShe reads 21*12 = <<21*12=252>>252 pages.",
    "252",
)


def figures(text):
    return [number.value for number in numbers_in(text)]


@pytest.mark.parametrize("item", [PENS, SHIRT, WEEK], ids=["pens", "shirt", "week"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_variations_are_consistent(item, seed):
    found = vary(item, 12, seed)
    assert len(found) == 12 and len({one.problem.question for one in found}) == 12
    shape = re.sub(r"[\d.,]*\d", "#", item.problem.question + item.reasoning)
    for one in found:
        assert re.sub(r"[\d.,]*\d", "#", one.problem.question + one.reasoning) == shape
        assert holds(one.reasoning, one.answer) and one.problem.golds == (one.answer,)
        assert one.problem.question != item.problem.question


def test_each_chain_follows_from_its_question():
    for one in vary(PENS, 20, 0):
        has, gives, price = figures(one.problem.question)
        assert Fraction(one.answer) == (has - gives) * price and 24 <= has <= 96 and 7 <= gives < has
        assert re.search(r"x \$\d+\.\d\d = .*>>\d+\.\d\d\.$", one.reasoning)
    for one in vary(SHIRT, 20, 0):
        price, share = figures(one.problem.question)
        assert int(one.answer) == price - price * share / 100 and share % 5 == 0 and price % 1 == 0
    for one in vary(WEEK, 20, 0):
        pages, weeks = figures(one.problem.question)
        assert int(one.answer) == pages * weeks * 7 and "*7 = <<" in one.reasoning


@st.composite
def chains(draw):
    """A story of gains and losses with its working, of any length."""
    total = draw(st.integers(20, 300))
    question, working = f"Bo starts with {total} stones.", []
    for _ in range(draw(st.integers(1, 4))):
        sign = draw(st.sampled_from("+-"))
        amount = draw(st.integers(2, max(2, total - 2 if sign == "-" else 200)))
        after = total + amount if sign == "+" else total - amount
        if after < 2:
            break
        question += f" Then Bo {'finds' if sign == '+' else 'loses'} {amount} stones."
        working.append(f"That makes {total} {sign} {amount} = <<{total}{sign}{amount}={after}>>{after} stones.")
        total = after
    return row(question + " How many stones are there?", "\n".join(working), str(total))


@given(chains(), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_the_answer_of_any_chain_is_what_its_question_gives(item, seed):
    for one in vary(item, 4, seed):
        start, *amounts = figures(one.problem.question)
        verbs = re.findall("finds|loses", one.problem.question)
        total = start + sum(n if verb == "finds" else -n for verb, n in zip(verbs, amounts, strict=True))
        assert one.answer == str(total) and total >= 2


def test_what_was_larger_stays_larger_and_several_stay_several():
    item = row(
        "Ada has 9 dogs and 7 cats. How many more dogs than cats are there?", "9 - 7 = <<9-7=2>>2 more dogs.", "2"
    )
    found = vary(item, 30, 0)
    assert found
    for one in found:
        dogs, cats = figures(one.problem.question)
        assert dogs > cats >= 2 and int(one.answer) >= 2


def test_divisions_stay_exact_and_days_fit_into_their_week():
    item = row(
        "A team of 6 packs 90 boxes in 5 days a week. How many boxes a day does each pack?",
        "They pack 90/5 = <<90/5=18>>18 boxes a day.\nThat is 18/6 = <<18/6=3>>3 boxes each.",
        "3",
    )
    found = vary(item, 20, 0)
    assert found
    for one in found:
        team, boxes, days = figures(one.problem.question)
        assert days <= 7 and boxes == int(one.answer) * team * days


def test_equal_numbers_that_could_be_either_stay_equal():
    item = row(
        "Tim has 20 coins, spends 10 and then 4. How many are left?",
        "First he has 20 - 10 = <<20-10=10>>10 coins.\nThen he has 10 - 4 = <<10-4=6>>6 coins.",
        "6",
    )
    found = vary(item, 10, 0)
    assert found
    for one in found:
        first, second, third = figures(one.problem.question)
        assert first == 2 * second and int(one.answer) == second - third


def test_large_numbers_are_varied_too():
    item = row(
        "A firm has $98,765,431 and spends $1,234,567. Left?", "<<98765431-1234567=97530864>>97,530,864.", "97530864"
    )
    found = vary(item, 5, 0)
    assert len(found) == 5
    for one in found:
        has, spends = figures(one.problem.question)
        assert int(one.answer) == has - spends and f"{has - spends:,}." in one.reasoning


def test_words_and_what_they_say_stay():
    item = row(
        "Three friends share 36 nuts, and each eats half of hers. How many does each have left?",
        "Each gets 36/3 = <<36/3=12>>12 nuts.\nEach keeps 12/2 = <<12/2=6>>6 nuts.",
        "6",
    )
    found = vary(item, 10, 0)
    assert found and all("/3 = <<" in one.reasoning and "/2 = <<" in one.reasoning for one in found)


@pytest.mark.parametrize(
    ("question", "working", "answer"),
    [
        ("Ed has 5 pens and 3 caps. How many pens?", "He has 5*1 = <<5*1=5>>5 pens.", "5"),
        ("Ed works from 9 am for 8 hours at $7. Pay?", "He gets 8*7 = <<8*7=56>>56.", "56"),
        ("A town of 3 million grows by 5. Size?", "It is 3+5 = <<3+5=8>>8.", "8"),
        ("It is -5 degrees and warms by 20. Now?", "It is 20-5 = <<20-5=15>>15.", "15"),
        ("It takes 2-4 hours. Twice?", "It takes 4*2 = <<4*2=8>>8.", "8"),
        ("Jo has 14 nuts, eats 5. Double?", "9 are left, so 9*2 = <<9*2=18>>18.", "18"),
        ("Jo has 14 nuts, eats 5. Left?", "x = 14 - 5, 2x = 18, x = <<14-5=9>>9.", "9"),
        ("Jo has 14 nuts, eats 5. Left?", "14 - 5 = <<14-5=9>>9, which is 77.", "9"),
        ("Jo has 14 nuts, eats 5. Left?", "14 - 5 = <<14-5=8>>8.", "8"),
        ("Jo has 14 nuts, eats 5. Left?", "14 - 5 = <<14-5=9>>9.", "10"),
        ("Jo has 14 nuts, eats 5. Left?", "14 - 5 = 9.", "9"),
        ("Jo has 14 nuts, eats 5. Left?", f"14 - 5 = <<14-5{'+0' * 9000}=9>>9.", "9"),
        (f"Jo has 1{'0' * 5000} nuts, gets 5 times 3.", "5 * 3 = <<5*3=15>>15.", "15"),
        ("Jo has 14 nuts, eats 5. Left?", f"14 - 5 = <<{'(' * 9000}14-5=9>>9.", "9"),
    ],
)
def test_what_is_not_certain_is_left_alone(question, working, answer):
    assert vary(row(question, working, answer), 5, 0) == []


def test_variations_depend_on_content_and_seed_alone():
    assert vary(PENS, 8, 3) == vary(PENS, 8, 3) == vary(PENS, 20, 3)[:8]
    assert vary(PENS, 8, 3) != vary(PENS, 8, 4)
    named = row(PENS.problem.question, PENS.reasoning, PENS.answer, id="mine")
    assert [one.reasoning for one in vary(named, 8, 3)] == [one.reasoning for one in vary(PENS, 8, 3)]
    assert [one.problem.id for one in vary(named, 2, 3)] == ["mine~1", "mine~2"]


def write(path, *items):
    rows = [{"question": one.problem.question, "answer": f"{one.reasoning}\n#### {one.answer}"} for one in items]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_a_source_with_variations_gives_demonstrations_and_problems(tmp_path):
    other = row("Why?", "Because 1+1 = <<1+1=2>>2.", "2")
    options = DataOptions(source=write(tmp_path / "a.jsonl", PENS, other, WEEK), variations=5)
    found = load_demonstrations(options, seed=1)
    assert len(found) == 13 and [one.reasoning for one in found if ORIGIN not in one.problem.extra] == [
        PENS.reasoning,
        other.reasoning,
        WEEK.reasoning,
    ]
    assert all(holds(one.reasoning, one.problem.gold) for one in found)
    assert load_problems(options, seed=1) == [one.problem for one in found]
    assert load_problems(options, seed=2) != load_problems(options, seed=1)
    place = row_of(options, found[2].problem)
    assert place is not None and place.line == 1


def test_order_and_company_of_rows_do_not_matter(tmp_path):
    one = load_demonstrations(DataOptions(source=write(tmp_path / "a.jsonl", PENS, WEEK), variations=3), seed=0)
    two = load_demonstrations(DataOptions(source=write(tmp_path / "b.jsonl", WEEK, SHIRT, PENS), variations=3), seed=0)
    assert {item.reasoning for item in one} <= {item.reasoning for item in two}


def test_a_problem_and_its_variations_are_held_out_together(tmp_path):
    options = DataOptions(source=write(tmp_path / "a.jsonl", PENS, WEEK, SHIRT), variations=6)
    stays, held = split_share(load_demonstrations(options, seed=0), 0.3, 0)
    assert len(stays) == 14 and len(held) == 7
    assert len({item.problem.extra.get(ORIGIN, item.problem.id) for item in held}) == 1


def test_marks_can_be_dropped_with_and_without_variations(tmp_path):
    source = write(tmp_path / "a.jsonl", PENS, WEEK)
    assert [one.reasoning for one in load_demonstrations(DataOptions(source=source), seed=0)] == [
        PENS.reasoning,
        WEEK.reasoning,
    ]
    kept = load_demonstrations(DataOptions(source=source, variations=4), seed=0)
    dropped = load_demonstrations(DataOptions(source=source, variations=4, marks="drop"), seed=0)
    assert [one.problem for one in kept] == [one.problem for one in dropped]
    assert dropped[0].reasoning == "He keeps 48 - 15 = 33 pens.\nHe gets 33 x $2.50 = $82.50."
    assert not any("<<" in one.reasoning for one in dropped)


def test_marks_are_dropped_from_traces_responses_and_pairs():
    asked = Problem((Message("user", "2+2?"),), ("4",), traces=("2+2=<<2+2=4>>4",))
    assert unmarked(asked).traces == ("2+2=4",)
    shown = unmarked(Demonstration(asked, response="It is <<2+2=4>>4."))
    assert (shown.response, shown.problem.traces) == ("It is 4.", ("2+2=4",))
    pair = unmarked(Preference(asked, "<<2+2=4>>4", "5"))
    assert (pair.chosen, pair.rejected) == ("4", "5")


def test_both_options_name_the_entries_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("lemma.data.load_rows.SMALL", 0)
    source, cache = write(tmp_path / "a.jsonl", PENS, WEEK), str(tmp_path / "cache")
    chosen = [{}, {"marks": "drop"}, {"variations": 2}, {"variations": 3}, {"variations": 3, "marks": "drop"}]
    for options in chosen * 2:
        fresh = load_items(SourceOptions(source=source, **options), str(tmp_path / "other"), 0)
        assert load_items(SourceOptions(source=source, **options), cache, 0) == fresh
    first = load_items(SourceOptions(source=source, variations=3), cache, 0)
    assert load_items(SourceOptions(source=source, variations=3), cache, 1) != first


def test_held_out_data_and_data_without_marks_are_not_varied(tmp_path):
    with pytest.raises(ValidationError, match="variations are for training, and split 'test' is not"):
        SourceOptions(source="gsm8k", split="test", variations=2)
    with pytest.raises(ValidationError, match=r"raise arithmetic\.count"):
        SourceOptions(variations=2)
    with pytest.raises(UserError, match=r"test.jsonl:1: this row is held out, and variations are for training"):
        load_items(SourceOptions(source=write(tmp_path / "test.jsonl", PENS), variations=2))
    bare = row("Why?", "Because.", "2")
    with pytest.warns(LemmaWarning, match="has a solution with calculator marks that could be varied"):
        assert len(load_items(SourceOptions(source=write(tmp_path / "a.jsonl", bare), variations=2))) == 1


def test_show_says_where_a_varied_row_comes_from(tmp_path, capsys):
    source = write(tmp_path / "a.jsonl", PENS)
    assert main(["data", "show", source, "--set", "variations=2", "-n", "3"]) == 0
    said = capsys.readouterr().out
    assert said.count("varied from") == 2 and "~1 | gold" in said and f"varied from {PENS.problem.id}" in said


@pytest.mark.realdata
def test_gsm8k_is_varied_widely_and_in_time(tmp_path):
    source = SourceOptions(source=str(shared("data", "gsm8k", "train.jsonl.gz")))
    items = load_items(source, cache=str(tmp_path))[::16]
    began = time.process_time()
    found = [vary(item, 20, 0) for item in items]
    spent = time.process_time() - began
    assert sum(len(new) == 20 for new in found) > 0.4 * len(items)
    assert all(holds(one.reasoning, one.answer) for new in found for one in new[:2])
    assert spent < 60, "some ms for each of 467 rows, on a slow machine too"


@pytest.mark.realdata
def test_a_plan_filled_with_its_own_numbers_gives_the_row_back(tmp_path):
    source = SourceOptions(source=str(shared("data", "gsm8k", "train.jsonl.gz")))
    items = load_items(source, cache=str(tmp_path))[::16]
    plans = 0
    for item in items:
        try:
            plan = plan_of(item.problem.question, item.reasoning, item.answer)
        except Unclear:
            continue
        plans += 1
        values = [symbol.value for symbol in plan.symbols]
        assert written(plan.question, values) == item.problem.question
        assert written(plan.working, values) == item.reasoning
        assert written(plan.answer, values) == item.answer
    assert plans > 0.6 * len(items)
