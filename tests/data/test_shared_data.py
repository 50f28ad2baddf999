"""Every file of the shared data loads, with as many rows as its own table says."""

from __future__ import annotations

import re

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, problem_of
from lemma.data.data_options import DataOptions, SourceOptions
from lemma.data.load_rows import load_demonstrations, load_items, load_problems
from lemma.data.readers import READERS
from lemma.data.sources import rows_of
from tests.shared import SHARED, shared

pytestmark = pytest.mark.realdata


def files() -> dict[str, int]:
    """File and row count, from the table in the README."""
    readme = SHARED / "data" / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    found = re.findall(r"^\| (\S+\.jsonl(?:\.gz)?) \| ([\d,]+) \|", text, flags=re.MULTILINE)
    return {name: int(count.replace(",", "")) for name, count in found}


def test_the_table_names_all_files():
    folder = shared("data")
    there = {str(path.relative_to(folder)) for path in folder.rglob("*.jsonl*")}
    assert there == set(files())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", sorted(set(files()) - {"grader/dev.jsonl"}))
def test_every_file_loads_by_itself(name, cache):
    path = shared("data", name)
    items = load_items(SourceOptions(source=str(path)), cache=cache)
    assert len(items) == files()[name]
    problems = [problem_of(item) for item in items]
    assert all(problem.golds and problem.question and problem.source for problem in problems)
    assert len({problem.id for problem in problems}) == len(problems)


def test_the_grader_cases_are_not_problems():
    path = shared("data", "grader", "dev.jsonl")
    assert len(rows_of(SourceOptions(source=str(path)))) == files()["grader/dev.jsonl"]
    with pytest.raises(UserError, match=r"dev.jsonl:1: these columns do not say which is the question"):
        load_items(SourceOptions(source=str(path)))


def test_gsm8k_from_its_own_columns_says_the_same_as_the_schema():
    path = shared("data", "gsm8k", "test.jsonl.gz")
    for row in rows_of(SourceOptions(source=str(path))):
        ours, theirs = READERS["lemma"].read(row.values), READERS["gsm8k"].read(row.values["original"])
        assert (ours.reasoning, ours.answer) == (theirs.reasoning, theirs.answer)
        assert ours.problem.messages == theirs.problem.messages and ours.problem.golds == theirs.problem.golds


def test_math_from_its_own_columns_finds_the_box():
    for row in rows_of(SourceOptions(source=str(shared("data", "math", "math500.jsonl")))):
        original = dict(row.values["original"])
        answer = original.pop("answer")
        item = READERS["math"].read(original)
        assert item.problem.gold.replace(" ", "") == answer.replace(" ", "")
        assert item.problem.level == str(row.values["level"])


def test_traces_become_demonstrations():
    counts = {"math_r1zero_sft": 1767, "math_deepseek_chat": 272, "math_boxed_cot": 384, "long_traces": 400}
    for name, count in counts.items():
        options = DataOptions(source=str(shared("data", "traces", f"{name}.jsonl.gz")))
        found = load_demonstrations(options, seed=0)
        assert len(found) == count
        assert all(item.response or (item.reasoning and item.answer) for item in found)
    r1_zero: list[Demonstration] = load_demonstrations(
        DataOptions(source=str(shared("data", "traces", "math_r1zero_sft.jsonl.gz"))), seed=0
    )
    assert all(item.prompt.endswith("Assistant: <think>") for item in r1_zero)
    assert all(item.problem.question in item.prompt for item in r1_zero)


def test_problems_seen_in_evaluations_can_be_left_out(cache):
    path = shared("data", "dapo_math_17k.jsonl.gz")
    options = DataOptions(source=str(path), drop_if="in_eval_sets", cache=cache)
    assert len(load_problems(options, seed=0)) == 17188 - 984


def test_multiple_choice_golds_are_letters_of_choices(cache):
    for name in ("arc_challenge_test.jsonl", "mmlu_pro_test.jsonl.gz"):
        for problem in load_problems(DataOptions(source=str(shared("data", name)), cache=cache), seed=0):
            assert 0 <= "ABCDEFGHIJ".index(problem.gold) < len(problem.choices)


def test_rows_without_solutions_are_refused_and_others_mixed():
    with pytest.raises(UserError, match=r"aime25.jsonl:1: this row lacks a solution to imitate"):
        load_demonstrations(DataOptions(source=str(shared("data", "aime25.jsonl"))), seed=0)
    mixed = [SourceOptions(source=str(shared("data", name))) for name in ("aime24.jsonl", "minerva_math.jsonl")]
    assert len(load_demonstrations(DataOptions(mix=mixed), seed=0)) == 302


def test_long_traces_keep_their_headings(cache):
    """Markdown has headings that look like GSM8K's mark of the answer."""
    path = shared("data", "traces", "long_traces.jsonl.gz")
    items = load_items(SourceOptions(source=str(path)), cache=cache)
    rows = rows_of(SourceOptions(source=str(path)))
    assert [item.reasoning for item in items] == [row.values["generated_solution"].strip() for row in rows]
    assert sum("\n####" in item.reasoning for item in items) > 30
