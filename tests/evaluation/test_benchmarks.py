"""Every benchmark whose rows are here loads in full, and every gold can be graded."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.data.choices import ASK_FOR_LETTER, shown
from lemma.data.data_options import SourceOptions
from lemma.evaluation.benchmarks import BENCHMARKS, Benchmark, find_benchmark, load_benchmark
from lemma.formats import FORMATS
from lemma.grading import GradingService
from tests.shared import SHARED, shared

FILES = {
    "gsm8k": "gsm8k/test.jsonl.gz",
    "math500": "math/math500.jsonl",
    "aime24": "aime24.jsonl",
    "aime25": "aime25.jsonl",
    "amc23": "amc23.jsonl",
    "amc": "amc_aimo83.jsonl",
    "minerva": "minerva_math.jsonl",
    "olympiadbench": "olympiadbench_math_en.jsonl.gz",
    "arc_challenge": "arc_challenge_test.jsonl",
    "mmlu_pro": "mmlu_pro_test.jsonl.gz",
}
# One or two rows of my own making, in the columns of the datasets that are not here, and in those of the hub.
ROWS: dict[str, list[dict[str, Any]]] = {
    "math": [{"problem": "2+2?", "solution": r"It is $\boxed{4}$.", "level": "Level 3", "type": "Algebra"}],
    "gpqa_diamond": [
        {"Question": "Which?", "Correct Answer": "this", "Subdomain": "Physics"}
        | {f"Incorrect Answer {number}": f"that {number}" for number in (1, 2, 3)}
    ],
    "olympiadbench": [
        {"id": 1, "question": "r?", "final_answer": ["4.2"], "error": "1e-1", "subfield": "Algebra"},
        {"id": 2, "question": "a, b?", "final_answer": ["1", "2"], "error": None, "subfield": "Algebra"},
    ],
    "arc_challenge": [
        {"id": "x", "question": "Which?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}
    ],
    "mmlu_pro": [
        {"question_id": 7, "question": "Which?", "options": ["a", "b"], "answer": "B", "category": "law"}
    ],
    "gsm8k": [{"question": "2+2?", "answer": "2+2=4\n#### 4"}],
    "hellaswag": [
        {"activity_label": "x", "ctx_a": "He", "ctx_b": "", "endings": ["a", "b"], "label": "1"}
    ],
    "minerva": [{"question": "How far?", "answer": "1.6"}],
    "amc": [{"id": 0, "problem": "2+2?", "answer": 4.0, "url": "x"}],
}  # fmt: skip


def counts() -> dict[str, int]:
    text = (SHARED / "data" / "README.md").read_text(encoding="utf-8") if SHARED.exists() else ""
    found = re.findall(r"^\| (\S+\.jsonl(?:\.gz)?) \| ([\d,]+) \|", text, flags=re.MULTILINE)
    return {name: int(count.replace(",", "")) for name, count in found}


def test_the_registry_names_them_all() -> None:
    assert set(BENCHMARKS) == {*FILES, "math", "gpqa_diamond", "hellaswag", "arithmetic"}
    assert all(one.format in FORMATS for one in BENCHMARKS.values())


@pytest.fixture(scope="module")
def service() -> Iterator[GradingService]:
    with GradingService() as service:
        yield service


# Golds that only the same text is known to equal: a dotted letter, a half-open interval behind a name.
UNREAD = ("\\ddot", "\\dot", "t(0,4]")


@pytest.mark.realdata
@pytest.mark.parametrize("name", FILES)
def test_a_benchmark_loads_in_full_and_every_gold_is_gradable(name: str, service: GradingService) -> None:
    benchmark = BENCHMARKS[name]
    loaded = load_benchmark(benchmark, data_dir=shared("data"))
    assert len(loaded.problems) == counts()[FILES[name]]
    assert len({problem.id for problem in loaded.problems}) == len(loaded.problems)
    asked = {(gold, benchmark.rules_of(problem)) for problem in loaded.problems for gold in problem.golds}
    for gold, rules in asked:
        assert service.grade(f"so \\boxed{{{gold}}}", gold, rules).right, gold
        expected = "unknown" if any(part in gold for part in UNREAD) else "wrong"
        assert service.grade("-98765.4321", gold, rules).kind == expected, gold


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_the_columns_of_the_hub(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    loaded = load_benchmark(BENCHMARKS[name], data_dir=tmp_path)
    assert len(loaded.problems) == len(ROWS[name])
    first = loaded.problems[0]
    assert first.golds and first.question
    if first.choices:
        right = first.choices[string.ascii_uppercase.index(first.golds[0])]
        assert right == {"gpqa_diamond": "this"}.get(name, "b")


def test_tolerances(service: GradingService) -> None:
    minerva, olympiad = BENCHMARKS["minerva"], BENCHMARKS["olympiadbench"]
    loose = Problem((Message("user", "r?"),), ("4.2",), extra={"original": {"error": "1e-1"}})
    exact = Problem((Message("user", "r?"),), ("4.2",), extra={"original": {"error": None}})
    assert service.grade("4.15", "4.2", olympiad.rules_of(loose)).right
    assert not service.grade("4.15", "4.2", olympiad.rules_of(exact)).right
    assert service.grade("4.49e33", "4.5e33", minerva.rules_of(exact)).right
    assert not service.grade("4.4e33", "4.5e33", minerva.rules_of(exact)).right
    odd = Problem((Message("user", "r?"),), ("4.2",), id="row", extra={"original": {"error": "small"}})
    with pytest.raises(UserError, match="the tolerance 'small' of problem row of olympiadbench is not a number"):
        olympiad.rules_of(odd)


def test_options_are_shuffled_and_the_gold_moves_along() -> None:
    choices = ("a", "b", "right", "d")
    problems = [Problem((Message("user", f"Which {i}?"),), ("C",), id=str(i), choices=choices) for i in range(200)]
    asked = [shown(problem, "mine") for problem in problems]
    for problem in asked:
        letter = problem.golds[0]
        assert f"\n{letter}) right\n" in problem.question and problem.question.endswith(ASK_FOR_LETTER)
    letters = Counter(problem.golds[0] for problem in asked)
    assert set(letters) == set("ABCD") and min(letters.values()) > 25
    assert (
        asked == [shown(problem, "mine") for problem in problems] != [shown(problem, "yours") for problem in problems]
    )


def test_a_limit_always_keeps_the_same_problems_from_everywhere() -> None:
    whole = load_benchmark(BENCHMARKS["arithmetic"]).problems
    few, fewer = (load_benchmark(BENCHMARKS["arithmetic"], limit=limit).problems for limit in (50, 20))
    places = [whole.index(problem) for problem in few]
    assert places == sorted(places) and max(places) > 250 and set(fewer) <= set(few)


def test_five_lines_make_a_benchmark(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n' * 2)
    entry = tmp_path / "mine.yaml"
    entry.write_text("source: rows.jsonl\nformat: xml\nsamples: 4\nmetric: maj\nrules: {relative: 0.1}\n")
    benchmark = find_benchmark(str(entry))
    assert (benchmark.name, benchmark.samples, benchmark.rules.relative) == ("mine", 4, 0.1)
    problems = load_benchmark(benchmark).problems
    assert len({problem.id for problem in problems}) == 2, "repeated rows are problems of their own"
    bare = find_benchmark(str(tmp_path / "rows.jsonl"))
    assert bare.name == "rows" and len(load_benchmark(bare).problems) == 2
    assert find_benchmark("owner/some-set").name == "some-set"
    assert find_benchmark({"source": "arithmetic", "arithmetic": {"count": 3}}).name == "arithmetic"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("math50", "there is no benchmark 'math50'; did you mean 'math500'?"),
        ({"source": "x.jsonl", "sample": 3}, "a benchmark has no option 'sample'; did you mean 'samples'?"),
        ({"source": "x.jsonl", "samples": 0}, "option 'samples' of a benchmark: Input should be greater"),
        ("absent.yaml", "there is no file absent.yaml"),
    ],
)
def test_a_wrong_benchmark_gets_one_sentence(spec: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        find_benchmark(spec)
    assert str(caught.value).startswith(sentence)


def test_an_entry_that_is_no_mapping_is_called_a_benchmark(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- source: rows.jsonl\n")
    with pytest.raises(UserError, match="the benchmark is a list, not `key: value` lines"):
        find_benchmark(str(tmp_path / "list.yaml"))


def test_a_folder_without_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no file of benchmark amc; put it there as amc_aimo83\.jsonl"):
        load_benchmark(BENCHMARKS["amc"], data_dir=tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        load_benchmark(Benchmark(name="x", source="x"), data_dir=tmp_path / "absent")


def test_the_pages_name_every_benchmark_and_key() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    page, how_to = (docs / "evaluation.md").read_text(), (docs / "how-to" / "add-a-benchmark.md").read_text()
    for name, benchmark in BENCHMARKS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {benchmark.samples} |" in row and all(file in row for file in benchmark.files), name
    own = set(Benchmark.model_fields) - set(SourceOptions.model_fields)
    assert all(f"`{key}`" in how_to for key in own)
    entry = re.findall(r"```yaml\n(.*?)```", how_to, re.DOTALL)[0]
    assert Benchmark.model_validate(yaml.safe_load(entry)).metric == "maj"
