"""Training rows that repeat benchmark problems: the marks of DAPO-Math-17k, and rows made here."""

from __future__ import annotations

import gzip
import json
import string
from pathlib import Path
from typing import Any

import pytest

from lemma.cli import main
from lemma.core.random import stream
from lemma.core.types import Message, Problem
from lemma.data.choices import shown
from lemma.data.contamination import find_matches, normalised
from lemma.evaluation.stage_data import asked
from tests.shared import shared

LONG = (
    "A farmer has seventeen sheep in one field and twice as many goats in another field behind the barn . Every "
    "morning three of the sheep jump over the fence and one goat wanders back . After how many mornings are there as "
    "many sheep as goats in each of the two fields ?"
)
SHORT = "For how many values of the constant $k$ does $x^2+kx+36$ have two distinct integer roots?"


def made_up(count: int, words: int, name: str) -> list[str]:
    """Texts of random words: no two share an n-gram."""
    letters = stream(0, "texts", name).choice(list(string.ascii_lowercase), (count, words, 7))
    return [" ".join("".join(word) for word in text) for text in letters]


@pytest.mark.parametrize("problem", [LONG, SHORT, "What is $3+4$?"])
def test_the_same_text_in_another_spelling_is_exact(problem: str) -> None:
    other = f"  {problem.upper()}\n".replace(" ", "  ").replace("$", "")
    matches = find_matches([*made_up(5, 40, "a"), other], [*made_up(3, 40, "b"), problem])
    assert [(m.row, m.problem, m.kind) for m in matches] == [(5, 3, "exact")]


def test_latex_spacing_does_not_matter_but_signs_do() -> None:
    assert normalised(r"$\dfrac{1}{2}\left( x\,+\,1 \right)$.") == normalised(r"\frac{1}{2}(x+1)")
    assert normalised("$x^2-1$") != normalised("$x^2+1$")


def test_a_problem_inside_a_longer_row_is_an_overlap() -> None:
    row = f"Solve the following problem step by step . {LONG} Give the answer as an integer ."
    (match,) = find_matches([row], [LONG])
    assert (match.kind, match.share) == ("overlap", 1.0)


def test_the_share_is_that_of_the_problems_ngrams() -> None:
    """Of 40 words, 28 13-grams; a row with the first 30 words has 18 of them, one with 21 has 9, one with 20 has 8."""
    (problem,) = made_up(1, 40, "c")
    words = problem.split()
    matches = find_matches([" ".join(words[:count]) for count in (30, 21, 20)], [problem])
    assert [(m.row, m.share) for m in matches] == [(0, 18 / 28), (1, 9 / 28)]


def test_a_short_problem_needs_more_of_its_words() -> None:
    """Of 20 words, 13 8-grams; with 17 words 10 of them are found (0.77), with 16 only 9 (0.69)."""
    (problem,) = made_up(1, 20, "d")
    words = problem.split()
    matches = find_matches([" ".join(words[:17]), " ".join(words[:16])], [problem])
    assert [(m.row, m.share) for m in matches] == [(0, 10 / 13)]


def test_phrases_of_the_trade_do_not_count() -> None:
    """What many rows have in common tells nothing, even where it is most of a problem; copies of one row still do."""
    phrase, own = made_up(1, 30, "e")[0], made_up(12, 8, "f")
    rows = [f"{phrase} {words}" for words in own]
    assert find_matches(rows, [f"{phrase} {made_up(1, 8, 'g')[0]}"]) == []
    assert len(find_matches([rows[0]] * 50, [rows[0]])) == 50


@pytest.mark.parametrize("variants", [9, 30])
@pytest.mark.parametrize("words", [20, 40])
def test_many_variants_of_one_problem_are_all_found(variants: int, words: int) -> None:
    """Their number makes the words of the problem common, but each holds all of it."""
    (problem,) = made_up(1, words, "j")
    rows = [f"{problem} {own}" for own in made_up(variants, 6, "k")]
    others = made_up(50, words, "l")
    assert [(m.row, m.problem) for m in find_matches([*rows, *others], [problem])] == [(i, 0) for i in range(variants)]


def test_unrelated_texts_never_match() -> None:
    assert find_matches(made_up(300, 50, "h"), made_up(300, 50, "i")) == []
    assert find_matches([], [LONG]) == [] and find_matches([LONG], []) == [] and find_matches([""], [LONG]) == []


def load(*parts: str) -> list[dict[str, Any]]:
    path = shared("data", *parts)
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


FILES = {
    "math500": ("math", "math500.jsonl"),
    "amc23": ("amc23.jsonl",),
    "amc_aimo83": ("amc_aimo83.jsonl",),
    "olympiadbench": ("olympiadbench_math_en.jsonl.gz",),
    "gsm8k": ("gsm8k", "test.jsonl.gz"),
    "minerva": ("minerva_math.jsonl",),
}


@pytest.mark.realdata
def test_finds_every_marked_row_of_dapo() -> None:
    """All rows whose evaluation set is here, word for word. docs/results/contamination.md judges what else it finds."""
    rows = load("dapo_math_17k.jsonl.gz")
    problems = [(name, row) for name, parts in FILES.items() for row in load(*parts)]
    matches = find_matches([row["problem"] for row in rows], [row["problem"] for _, row in problems])
    exact = {(match.row, problems[match.problem][0]) for match in matches if match.kind == "exact"}
    marked = {(place, name) for place, row in enumerate(rows) for name in row["in_eval_sets"] if name in FILES}
    assert len(marked) == 21
    assert marked <= exact
    overlaps = {(match.row, problems[match.problem][0]) for match in matches} - exact
    assert {name for _, name in overlaps} <= {"math500", "amc23", "amc_aimo83", "olympiadbench"}
    assert 140 <= len({row for row, _ in overlaps}) <= 180


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"question": text, "answer": "7"}) + "\n" for text in texts))
    return path


def test_the_command_names_the_rows_and_writes_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*made_up(4, 30, "j"), LONG.upper(), f"Solve this . {SHORT}"]
    source = write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "aime24.jsonl", [*made_up(2, 30, "k"), LONG])
    other = write_rows(tmp_path / "mine.jsonl", [SHORT])
    clean = tmp_path / "clean.jsonl"
    against = ["--against", f"aime24,{other}", "--data-dir", str(tmp_path)]
    assert main(["data", "check", str(source), *against, "--clean", str(clean)]) == 0
    said = capsys.readouterr().out
    assert "aime24: 1 of its 3 problems (33.3%) found in the data; rows word for word: 1, nearly so: 0" in said
    assert "mine: 1 of its 1 problems (100.0%) found in the data; rows word for word: 0, nearly so: 1" in said
    assert "2 of 6 rows repeat a problem" in said and "row 5 (" in said and "100% of its n-grams" in said
    assert [json.loads(line)["problem"] for line in clean.read_text().splitlines()] == rows[:4]
    assert main(["data", "check", str(source)]) == 2
    assert "nothing to compare with" in capsys.readouterr().err


def test_problems_to_compare_with_need_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "train.jsonl", [LONG])
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": LONG, "chosen": "yes", "rejected": "no"}) + "\n")
    assert main(["data", "check", str(source), "--against", str(pairs)]) == 0
    assert "pairs: 1 of its 1 problems (100.0%) found in the data" in capsys.readouterr().out


def test_options_count_where_the_question_says_little() -> None:
    """Benchmarks show options in a drawn order; a question that stands alone is enough where it is long."""

    def multiple(question: str, *choices: str) -> Problem:
        return Problem((Message("user", question),), ("A",), choices=choices)

    generic = "Which of these is true?"
    one, two = multiple(generic, "cats bark", "dogs bark"), multiple(generic, "two is odd", "two is even")
    assert [asked(shown(one, name)) == asked(one) for name in "abcd"] == [True] * 4
    assert asked(one) != asked(two)
    assert asked(shown(multiple(LONG, "1", "2"), "b")) == LONG


PLANNED = """
stages:
  sft:
    data: {{source: {source}}}
    steps: 5
"""


def test_the_plan_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "train.jsonl", [*made_up(4, 30, "l"), LONG])
    write_rows(tmp_path / "aime24.jsonl", [LONG])
    write_rows(tmp_path / "aime25.jsonl", [SHORT])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(PLANNED.format(source=source))
    more = ["--data-dir", str(tmp_path)]
    assert main(["plan", str(recipe), "--against", "aime24,aime25", *more]) == 1, "the rows have no solutions"
    said = capsys.readouterr().out
    assert "WARNING: sft: 1 of 5 rows repeat problems" in said and "aime24: 1 of its 1 problems" in said
    assert main(["plan", str(recipe), "--against", "aime25", *more]) == 1
    assert "sft: no row repeats a problem of aime25" in capsys.readouterr().out
    assert main(["plan", str(recipe)]) == 1
    assert "repeat" not in capsys.readouterr().out
    evaluated = f"    eval: {{benchmarks: [aime24], data_dir: {tmp_path}}}\n"
    recipe.write_text(PLANNED.format(source=source) + evaluated)
    for command in (["plan", str(recipe)], ["data", "check", str(recipe)]):
        assert main(command) == (command[0] == "plan")
        assert "aime24: 1 of its 1 problems (100.0%) found in the data" in capsys.readouterr().out
    recipe.write_text(PLANNED.format(source=tmp_path / "later.jsonl") + evaluated)
    assert main(["plan", str(recipe)]) == 1
    assert "sft: data not compared with aime24; --check-data does it" in capsys.readouterr().out
