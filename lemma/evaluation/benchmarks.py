"""Benchmarks by name: where each comes from, how its rows are read, asked and graded, and how many samples it wants.

Adding one is an entry in `BENCHMARKS`, or, without touching the code, a YAML file of a few lines or a data file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from lemma.core.errors import UserError, nearest
from lemma.core.random import permutation
from lemma.core.types import Problem
from lemma.data.choices import shown
from lemma.data.data_options import ArithmeticOptions, DataOptions, SourceOptions
from lemma.grading.rules import Rules

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".json", ".json.gz", ".csv", ".csv.gz")


class Benchmark(SourceOptions):
    """A set of problems with answers, and how it is meant to be measured."""

    name: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    """Its name in results; default: that of its source."""
    split: str = "test"
    """Split of a hub dataset or of the built-in generator."""
    files: tuple[str, ...] = ()
    """Names under --data-dir that it may have there, without the suffix; its own name is always tried."""
    format: str = "boxed"
    """Format of prompts and answers where neither the command nor the model's run names one."""
    samples: int = Field(1, ge=1)
    """Samples of each problem."""
    metric: Literal["avg", "pass", "maj"] = "avg"
    """What stands in tables: the mean over samples, the chance that one of all samples is right, or the majority."""
    rules: Rules = Rules()
    """What counts as equal: tolerances, order of lists, and so on."""
    tolerance: str | None = None
    """Column, or columns joined by dots, that gives a row its own absolute tolerance, such as `original.error`."""

    def rules_of(self, problem: Problem) -> Rules:
        """The rules for one problem, its own tolerance included."""
        value: Any = problem.extra
        for name in (self.tolerance or "").split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value in (None, ""):
            return self.rules
        try:
            return self.rules.model_copy(update={"absolute": abs(float(value))})
        except (TypeError, ValueError):
            raise UserError(
                f"the tolerance '{value}' of problem {problem.id} of {self.name} is not a number",
                fix="repair the row, or remove `tolerance` from the benchmark",
            ) from None


BENCHMARKS: dict[str, Benchmark] = {
    one.name: one
    for one in (
        Benchmark(name="gsm8k", source="gsm8k", files=("gsm8k/test",)),
        Benchmark(name="math", source="math", files=("math/test",)),
        Benchmark(name="math500", source="math500", files=("math/math500",)),
        Benchmark(name="aime24", source="aime24", split="train", samples=32),
        Benchmark(name="aime25", source="aime25", samples=32),
        Benchmark(name="amc23", source="amc23", samples=32),
        Benchmark(name="amc", source="AI-MO/aimo-validation-amc", split="train", files=("amc_aimo83",), samples=32),
        Benchmark(name="minerva", source="minerva_math", files=("minerva_math",), rules=Rules(relative=0.01)),
        Benchmark(
            name="olympiadbench",
            source="olympiadbench",
            files=("olympiadbench_math_en",),
            tolerance="original.error",
        ),
        Benchmark(name="arc_challenge", source="arc_challenge", files=("arc_challenge_test",)),
        Benchmark(name="gpqa_diamond", source="gpqa_diamond", split="train", samples=4),
        Benchmark(name="mmlu_pro", source="mmlu_pro", files=("mmlu_pro_test",)),
        Benchmark(name="arithmetic", source="arithmetic", format="r1_zero", arithmetic=ArithmeticOptions(count=500)),
    )
}


@dataclass(frozen=True)
class Loaded:
    """A benchmark and its problems as they are asked, options shuffled and written out."""

    benchmark: Benchmark
    problems: tuple[Problem, ...]

    @property
    def name(self) -> str:
        return self.benchmark.name


def find_benchmark(spec: str | Mapping[str, Any] | Benchmark) -> Benchmark:
    """A benchmark by its name, a YAML file, a data file, a hub dataset, or a mapping as a recipe writes it."""
    if isinstance(spec, Benchmark):
        return spec if spec.name else spec.model_copy(update={"name": _name_of(spec.source)})
    if isinstance(spec, Mapping):
        return find_benchmark(_validated(spec, "a benchmark"))
    if spec in BENCHMARKS:
        return BENCHMARKS[spec]
    if spec.endswith((".yaml", ".yml")):
        from lemma.config.load import load

        if not Path(spec).is_file():
            raise UserError(f"there is no file {spec}", fix="write the path of a YAML entry, or a benchmark's name")
        entry = load(Benchmark, spec, what="benchmark")
        beside = Path(spec).parent / entry.source
        update = {"name": entry.name or Path(spec).stem}
        if beside.exists() and not Path(entry.source).exists():
            update["source"] = str(beside)
        return entry.model_copy(update=update)
    if spec.endswith(DATA_SUFFIXES) or "/" in spec:
        return Benchmark(name=_name_of(spec), source=spec)
    raise UserError(
        f"there is no benchmark '{spec}'",
        fix=f"{nearest(spec, BENCHMARKS)} (a data file, a hub dataset or a YAML entry will do as well)",
    )


def _validated(values: Mapping[str, Any], what: str) -> Benchmark:
    try:
        return Benchmark.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise UserError(f"{what} has no option '{place}'", fix=nearest(place, Benchmark.model_fields)) from None
        raise UserError(f"option '{place}' of {what}: {first['msg']}") from None


def _name_of(source: str) -> str:
    """A name from a path or a hub name: what stands last, without its suffix."""
    last = source.rstrip("/").rsplit("/", 1)[-1]
    for suffix in DATA_SUFFIXES:
        last = last.removesuffix(suffix)
    return "".join(letter if letter.isalnum() or letter in "_-." else "_" for letter in last)


def load_benchmark(
    benchmark: Benchmark, *, limit: int | None = None, data_dir: str | Path | None = None, to_grade: bool = True
) -> Loaded:
    """Its problems, at most `limit` of them; to be graded, each needs an answer.

    Which problems a limit keeps, and in what order options stand, depends on the benchmark only: evaluations of two
    models, or with two seeds, meet the same questions.
    """
    from lemma.data.load_rows import load_problems, load_rows
    from lemma.data.readers import problem_of

    source = _source_of(benchmark, data_dir)
    problems = load_problems(source, 0) if to_grade else [problem_of(item) for item in load_rows(source, 0)]
    if limit is not None and limit < len(problems):
        kept = sorted(permutation(len(problems), 0, "benchmark", benchmark.name, "limit")[:limit].tolist())
        problems = [problems[place] for place in kept]
    return Loaded(benchmark, tuple(_unique([shown(problem, benchmark.name) for problem in problems])))


def check_benchmark(spec: str | Mapping[str, Any] | Benchmark, *, data_dir: str | Path | None = None) -> None:
    """Refuse a benchmark whose files are not there, without reading them; the hub is not asked."""
    from lemma.data.sources import check_files

    check_files(_source_of(find_benchmark(spec), data_dir))


def _source_of(benchmark: Benchmark, data_dir: str | Path | None) -> DataOptions:
    """Where its problems are: in the folder that stands in for the hub, where one is given."""
    source = {name: getattr(benchmark, name) for name in SourceOptions.model_fields}
    if data_dir is not None and benchmark.source != "arithmetic" and not Path(benchmark.source).exists():
        source |= {"source": str(_file_in(Path(data_dir).expanduser(), benchmark)), "config": None}
    return DataOptions(**source)


def _file_in(folder: Path, benchmark: Benchmark) -> Path:
    """The file of a benchmark in a folder that stands in for the hub."""
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist", fix="write --data-dir and a folder of data files")
    stems = [*benchmark.files, benchmark.name]
    for stem in stems:
        for suffix in DATA_SUFFIXES:
            if (folder / f"{stem}{suffix}").is_file():
                return folder / f"{stem}{suffix}"
    raise UserError(
        f"{folder} has no file of benchmark {benchmark.name}",
        fix=f"put it there as {stems[0]}.jsonl, or leave --data-dir out to take it from the hub",
    )


def _unique(problems: Sequence[Problem]) -> list[Problem]:
    """Problems under ids that differ, also where a file repeats a row."""
    seen: dict[str, int] = {}
    found = []
    for problem in problems:
        count = seen[problem.id] = seen.get(problem.id, 0) + 1
        found.append(problem if count == 1 else replace(problem, id=f"{problem.id}#{count}"))
    return found
