from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lemma.core.errors import LemmaWarning, UserError
from lemma.core.types import Demonstration, Message, Problem
from lemma.data import cache, choices, load_rows, pairs, readers, sources
from lemma.data.data_options import ArithmeticOptions, DataOptions, LengthOptions, SourceOptions
from lemma.data.held_out import split_share
from lemma.data.load_rows import (
    filter_by_length,
    load_demonstrations,
    load_judged,
    load_preferences,
    load_problems,
    take,
)
from lemma.data.prepared import write_rows
from lemma.plugins.vary import marks, quantities, roles, vary


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def gsm8k(path, count=10, start=0):
    return write(path, [{"question": f"{n}?", "answer": f"w\n#### {n}"} for n in range(start, start + count)])


def problem(number):
    return Problem((Message("user", str(number)),), (str(number),))


def test_problems_and_demonstrations_of_one_file_keep_their_order(tmp_path):
    options = DataOptions(source=gsm8k(tmp_path / "train.jsonl"))
    problems = load_problems(options, seed=0)
    assert [one.gold for one in problems] == [str(n) for n in range(10)]
    assert {one.source for one in problems} == {"train"}
    assert [one.problem for one in load_demonstrations(options, seed=0)] == problems


def test_arithmetic_is_a_source_and_never_repeats():
    options = DataOptions(arithmetic=ArithmeticOptions(count=30), fraction=2.0)
    assert len({one.id for one in load_problems(options, seed=0)}) == 60
    assert len(load_demonstrations(DataOptions(count=7), seed=0)) == 7
    assert len(load_demonstrations(DataOptions(arithmetic=ArithmeticOptions(count=30)), seed=0)) == 30


@given(st.integers(1, 40), st.floats(0.01, 4), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_fraction_takes_each_item_as_often_as_it_should(size, fraction, seed):
    chosen = take(range(size), SourceOptions(fraction=fraction), seed, "x")
    assert len(chosen) == max(1, round(size * fraction))
    counts = Counter(chosen)
    assert max(counts.values()) - min(counts.get(item, 0) for item in range(size)) <= 1
    assert chosen == take(range(size), SourceOptions(fraction=fraction), seed, "x")


def test_samples_differ_by_seed_and_place():
    source = SourceOptions(count=5)
    drawn = {tuple(take(range(100), source, seed, name)) for seed in range(3) for name in ("0", "1")}
    assert len(drawn) == 6


def test_a_mixture_counts_shuffles_and_repeats_itself(tmp_path):
    mix = [
        SourceOptions(source=gsm8k(tmp_path / "a.jsonl"), fraction=0.5),
        SourceOptions(source=gsm8k(tmp_path / "b.jsonl", start=100), count=20),
        SourceOptions(source=gsm8k(tmp_path / "c.jsonl", start=200), count=0),
        SourceOptions(arithmetic=ArithmeticOptions(count=100), count=4),
    ]
    found = load_problems(DataOptions(mix=mix), seed=1)
    assert Counter(one.source for one in found) == {"a": 5, "b": 20, "arithmetic": 4}
    assert found == load_problems(DataOptions(mix=mix), seed=1)
    assert found != load_problems(DataOptions(mix=mix), seed=2)
    assert [one.source for one in found] != sorted(one.source for one in found)


def test_an_empty_mixture_is_refused(tmp_path):
    mix = [SourceOptions(source=gsm8k(tmp_path / "a.jsonl"), count=0)]
    with pytest.raises(UserError, match="the mixture holds no rows"):
        load_problems(DataOptions(mix=mix), seed=0)


@pytest.mark.parametrize(
    "beside",
    [{"source": "b.jsonl"}, {"drop_if": "in_eval_sets"}, {"count": 5}, {"answers": "number"}, {"split": "test"},
     {"arithmetic": {"operations": 3}}],
)  # fmt: skip
def test_options_of_one_source_beside_a_mixture_are_refused(beside):
    mix = [{"source": "a.jsonl"}]
    with pytest.raises(ValidationError, match=f"{next(iter(beside))} has no effect next to mix: write it inside each"):
        DataOptions.model_validate({"mix": mix, **beside})
    kept = {"source": "arithmetic", "cache": "c", "prompt_length": {"max_tokens": 9}}
    assert DataOptions.model_validate({"mix": mix, **kept}).mix[0].source == "a.jsonl"
    assert DataOptions.model_validate({"mix": [], **beside})


def test_filters_by_column_and_by_answer(tmp_path):
    rows = [
        {"problem": "p0", "answer": "1,000", "seen": [], "ok": True},
        {"problem": "p1", "answer": "x+1", "seen": [], "ok": True},
        {"problem": "p2", "answer": "3", "seen": ["math500"], "ok": True},
        {"problem": "p3", "answer": "4", "seen": [], "ok": False},
    ]
    path = write(tmp_path / "a.jsonl", rows)

    def questions(**options):
        return [one.question for one in load_problems(DataOptions(source=path, **options), seed=0)]

    assert questions(drop_if="seen") == ["p0", "p1", "p3"]
    assert questions(keep_if="ok") == ["p0", "p1", "p2"]
    assert questions(keep_if="ok", drop_if="seen", answers="number") == ["p0"]
    with pytest.raises(UserError, match=r"a.jsonl:1: there is no column 'sen' to filter by"):
        questions(drop_if="sen")
    with pytest.raises(UserError, match=r"no row of .* is left; loosen keep_if"):
        questions(keep_if="seen", drop_if="ok")


@pytest.mark.parametrize("no", ["False", "false", "0", "0.0", "No", '""', '" "', "NaN", "None", "[]"])
def test_text_that_means_no_is_not_true(no, tmp_path):
    (tmp_path / "a.csv").write_text(f"problem,answer,seen\np0,1,{no}\np1,2,True\np2,3,1\n")
    for column, left in (("drop_if", ["p0"]), ("keep_if", ["p1", "p2"])):
        options = DataOptions(source=str(tmp_path / "a.csv"), **{column: "seen"})
        assert [one.question for one in load_problems(options, seed=0)] == left


def test_a_cell_that_is_no_number_is_not_true(tmp_path):
    write_rows(tmp_path / "a.parquet", [{"problem": str(n), "answer": "1", "seen": n} for n in (0.0, 1.0, math.nan)])
    options = DataOptions(source=str(tmp_path / "a.parquet"), keep_if="seen")
    assert [one.question for one in load_problems(options, seed=0)] == ["1.0"]


def test_a_row_without_an_answer_is_named(tmp_path):
    rows = [{"id": str(n), "dataset": "d", "problem": "p", "answer": None if n == 2 else "1"} for n in range(4)]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=r"a.jsonl:3: this row lacks an answer to grade against \(columns: id, dataset"):
        load_problems(DataOptions(source=path), seed=0)
    with pytest.raises(UserError, match=r"a.jsonl:1: this row lacks a solution to imitate"):
        load_demonstrations(DataOptions(source=path), seed=0)
    with pytest.raises(UserError, match=r"a.jsonl:1: this row lacks a chosen and a rejected response"):
        load_preferences(DataOptions(source=path), seed=0)
    with pytest.raises(UserError, match="the built-in arithmetic does not provide a labelled response"):
        load_judged(DataOptions(count=5), seed=0)


def test_rows_without_a_teacher_are_left_out_with_a_warning(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": str(n)}],
            "reward_model": {"ground_truth": "1"},
            "target": [{"role": "assistant", "content": "<think>\n1"}] if n else None,
        }
        for n in range(3)
    ]
    options = DataOptions(source=write(tmp_path / "a.jsonl", rows))
    assert len(load_problems(options, seed=0)) == 3
    with pytest.warns(LemmaWarning, match="1 of 3 rows of .* lack a solution to imitate and were left out"):
        assert len(load_demonstrations(options, seed=0)) == 2


def test_files_left_out_of_a_folder_are_named(tmp_path, recwarn):
    for name in ("a", "b"):
        gsm8k(tmp_path / f"{name}.jsonl")
    assert len(load_problems(DataOptions(source=str(tmp_path)), seed=0)) == 20 and not recwarn.list
    gsm8k(tmp_path / "train.jsonl")
    gsm8k(tmp_path / "test.jsonl")
    with pytest.warns(LemmaWarning, match=r"left out of split 'train', because their names tell no split: a.jsonl, b"):
        assert len(load_problems(DataOptions(source=str(tmp_path)), seed=0)) == 10


def test_preferences_and_judgements(tmp_path):
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(3)]
    options = DataOptions(source=write(tmp_path / "a.jsonl", rows))
    assert [one.problem.question for one in load_preferences(options, seed=0)] == ["0?", "1?", "2?"]
    judged = load_judged(options, seed=0)
    assert [[(one.response, one.wanted) for one in row] for row in judged] == [[("yes", True), ("no", False)]] * 3
    labelled = write(tmp_path / "b.jsonl", [{"prompt": "p", "completion": "c", "label": False}])
    assert [[one.wanted for one in row] for row in load_judged(DataOptions(source=labelled), seed=0)] == [[False]]


@given(st.integers(0, 60), st.floats(0, 0.99), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_a_split_is_whole_disjoint_and_about_the_share(size, share, seed):
    items = [problem(number) for number in range(size)]
    stays, held = split_share(items, share, seed)
    assert sorted([*stays, *held], key=items.index) == items
    assert stays == [item for item in items if item not in held]
    assert (stays, held) == split_share(items, share, seed)
    if share > 0 and size >= 2:
        assert stays and len(held) == min(size - 1, max(1, round(share * size)))
    else:
        assert held == []


def test_copies_of_a_problem_stay_on_one_side():
    items = [Demonstration(problem(number), response=str(copy)) for copy in range(3) for number in range(20)]
    stays, held = split_share(items, 0.2, 0)
    assert len(held) == 12 and not {item.problem.id for item in stays} & {item.problem.id for item in held}
    same = [Demonstration(problem(1), response=str(copy)) for copy in range(4)]
    stays, held = split_share(same, 0.25, 0)
    assert len(stays) == 3 and len(held) == 1
    assert split_share(items, 0.2, 1)[1] != split_share(items, 0.2, 0)[1]


def test_lengths_by_percentile_by_number_and_by_both():
    lengths = [10, 20, 30, 40, 101]
    items = list("abcde")
    assert filter_by_length(items, lengths, LengthOptions()) == (items, None)
    assert filter_by_length(items, lengths, LengthOptions(percentile=0.5)) == (["a", "b", "c"], 30)
    assert int(np.quantile(lengths, 0.9)) == 76
    assert filter_by_length(items, lengths, LengthOptions(percentile=0.9)) == (["a", "b", "c", "d"], 76)
    assert filter_by_length(items, lengths, LengthOptions(max_tokens=30)) == (["a", "b", "c"], 30)
    assert filter_by_length(items, lengths, LengthOptions(max_tokens=25, percentile=0.9)) == (["a", "b"], 25)
    assert filter_by_length([], [], LengthOptions(percentile=0.9)) == ([], None)
    said = []
    filter_by_length(items, lengths, LengthOptions(max_tokens=25), said.append)
    filter_by_length(items, lengths, LengthOptions(max_tokens=101), said.append)
    assert said == ["3 of 5 prompts are longer than the 25 tokens of prompt_length and were left out"]
    with pytest.raises(UserError, match="all 5 prompts are longer than 5 tokens; the shortest has 10; raise"):
        filter_by_length(items, lengths, LengthOptions(max_tokens=5))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache for files of any size, and a count of how often rows were really read."""
    monkeypatch.setattr(load_rows, "SMALL", 0)
    reads = []
    really = load_rows.stream_rows
    monkeypatch.setattr(load_rows, "stream_rows", lambda source, **how: reads.append(source) or really(source, **how))
    return tmp_path / "cache", reads


def test_the_cache_gives_back_the_same_items(tmp_path, kept):
    folder, reads = kept
    rows = [
        {"id": "1", "dataset": "d", "problem": "é\u2028?", "answer": "1", "choices": None, "original": {"a": [1, "x"]}},
        {"id": "2", "dataset": "d", "problem": "p", "answer": "2", "solution": "s", "target": "t"},
    ]
    options = DataOptions(source=write(tmp_path / "a.jsonl", rows), cache=str(folder))
    first = load_problems(options, seed=0)
    assert load_problems(options, seed=0) == first and len(reads) == 1
    assert first[0].extra == {"original": {"a": [1, "x"]}} and first[1].traces == ("t",)
    with pytest.warns(LemmaWarning, match="1 of 2"):
        assert load_demonstrations(options, seed=0)[0].reasoning == "s"
    assert len(reads) == 1


def test_rows_left_out_are_told_whenever_the_rest_is_used(tmp_path, kept):
    folder, reads = kept
    parted = {"chosen": "\n\nHuman: a\n\nAssistant: 4", "rejected": "\n\nHuman: b\n\nAssistant: 5"}
    alike = {"chosen": "\n\nHuman: a\n\nAssistant: 4", "rejected": "\n\nHuman: a\n\nAssistant: 5"}
    options = DataOptions(source=write(tmp_path / "a.jsonl", [alike, parted, alike]), cache=str(folder))
    for _ in range(2):
        with pytest.warns(LemmaWarning, match=r"1 of 3 rows were left out, such as this one: .*a.jsonl:2: ") as told:
            assert len(load_preferences(options, seed=0)) == 2
        assert len(told) == 1
    assert len(reads) == 1


def test_code_that_reads_and_filters_rows_names_the_entries(monkeypatch):
    before, without = cache._code_digest.__wrapped__(True), cache._code_digest.__wrapped__(False)
    really = cache.inspect.getsource
    for module in (load_rows, sources, choices, readers, pairs, marks, quantities, roles, vary):
        other = lambda one, module=module: really(one) + ("# other" if one is module else "")  # noqa: E731
        monkeypatch.setattr(cache.inspect, "getsource", other)
        assert cache._code_digest.__wrapped__(True) != before, module.__name__
        reads_numbers = module in (marks, quantities, roles, vary)
        assert (cache._code_digest.__wrapped__(False) == without) == reads_numbers, module.__name__


def test_other_content_or_other_options_are_another_entry(tmp_path, kept):
    folder, reads = kept
    options = DataOptions(source=gsm8k(tmp_path / "a.jsonl", 3), cache=str(folder))
    load_problems(options, seed=0)
    assert len(load_problems(options.model_copy(update={"answers": "number"}), seed=0)) == 3
    assert len(reads) == 2
    gsm8k(tmp_path / "a.jsonl", 4)
    assert len(load_problems(options, seed=0)) == 4 and len(reads) == 3
    load_problems(options.model_copy(update={"count": 2}), seed=5)
    assert len(reads) == 3, "what is drawn from the rows does not change them"


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: data.replace(b"1?", b"7?"), lambda data: b""])
def test_a_damaged_entry_is_made_again(tmp_path, kept, damage):
    folder, reads = kept
    options = DataOptions(source=gsm8k(tmp_path / "a.jsonl", 3), cache=str(folder))
    first = load_problems(options, seed=0)
    (entry,) = (folder / "data").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert load_problems(options, seed=0) == first and len(reads) == 2
    assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, kept):
    (tmp_path / "cache").write_text("a file where the folder should be")
    options = DataOptions(source=gsm8k(tmp_path / "a.jsonl", 3), cache=str(tmp_path / "cache"))
    with pytest.warns(LemmaWarning, match="prepared data could not be kept"):
        assert len(load_problems(options, seed=0)) == 3
