"""Benchmarks by name: where each comes from, how its rows are read, asked and graded, and how many samples it wants.

Adding one is an entry in `BENCHMARKS`, or, without touching the code, a data file, a YAML file of a few lines, a Python
file or an entry point of another package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lemma.config.registry import Registry, from_options
from lemma.core.errors import UserError, nearest
from lemma.core.random import permutation
from lemma.core.types import Problem
from lemma.data.choices import shown
from lemma.data.data_options import ArithmeticOptions, DataOptions, SourceOptions
from lemma.grading.rules import Rules

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".json", ".json.gz", ".csv", ".csv.gz")
OF_ENVIRONMENT = "environment"
"""The source of a benchmark whose problems are those of the environment that it is played in."""


class Benchmark(SourceOptions):
    """A set of problems with answers, and how it is meant to be measured."""

    name: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    """Its name in results. Default: the name of its source."""
    split: str = "test"
    """Split of a hub dataset or of the built-in generator."""
    files: tuple[str, ...] = ()
    """File names to look for under --data-dir, without the suffix; its own name is always tried."""
    format: str = "boxed"
    """Format of prompts and answers if neither the command nor the model's run names one."""
    samples: int = Field(1, ge=1)
    """Samples per problem."""
    metric: Literal["avg", "pass", "maj", "acc_norm"] = "avg"
    """The number shown in tables: the mean over samples, the chance that any of the samples is right, the majority
    vote, or, for log-likelihoods, the accuracy of the option that is likeliest per character."""
    scoring: Literal["generate", "likelihood"] = "generate"
    """Whether the model writes an answer, or its answer is the likeliest of the options."""
    weighs: Literal["option", "letter"] = "option"
    """What is scored by likelihood: each option's text after the question alone, or its letter after all options."""
    wording: str | None = None
    """Text before the option that is scored, with {question} in it. Default: `Question: ...` and `Answer:`."""
    shots: int = Field(0, ge=0)
    """Solved examples before each question, unless the command says otherwise."""
    shots_source: str | None = None
    """Where examples come from: a file or a dataset. Default: the benchmark's own source, in another split."""
    shots_split: str | None = "train"
    """The split that examples come from; null if a benchmark has only a test split."""
    shots_files: tuple[str, ...] = ()
    """File names of the examples under --data-dir, without the suffix. Default: `files` with the other split's name."""
    per_source: bool | None = None
    """Report each data source named in the rows separately. Default: only for LUFFY's files with several sources."""
    rules: Rules = Rules()
    """What counts as equal: tolerances, order of lists, and so on."""
    tolerance: str | None = None
    """Column that holds a row's own absolute tolerance; dots reach into nested columns, as in `original.error`."""

    def problems(self) -> Sequence[Problem] | None:
        """The problems, where a benchmark of your own makes them; None: they are read from the source."""
        return None

    @property
    def makes_problems(self) -> bool:
        return type(self).problems is not Benchmark.problems

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


FROM_MATH: dict[str, Any] = {"shots_source": "math", "shots_files": ("math/train",)}
"""Examples of benchmarks that have no training split of their own."""

_OWN = (
    Benchmark(name="gsm8k", source="gsm8k", files=("gsm8k/test",)),
    Benchmark(name="math", source="math", files=("math/test",)),
    Benchmark(name="math500", source="math500", files=("math/math500",), **FROM_MATH),
    Benchmark(name="aime24", source="aime24", split="train", samples=32, **FROM_MATH),
    Benchmark(name="aime25", source="aime25", samples=32, **FROM_MATH),
    Benchmark(name="amc23", source="amc23", samples=32, **FROM_MATH),
    Benchmark(name="amc", source="AI-MO/aimo-validation-amc", split="train", files=("amc_aimo83",), samples=32,
              **FROM_MATH),
    Benchmark(name="minerva", source="minerva_math", files=("minerva_math",), rules=Rules(relative=0.01), **FROM_MATH),
    Benchmark(name="olympiadbench", source="olympiadbench", files=("olympiadbench_math_en",),
              tolerance="original.error", **FROM_MATH),
    Benchmark(name="arc_challenge", source="arc_challenge", files=("arc_challenge_test",)),
    Benchmark(name="gpqa_diamond", source="gpqa_diamond", split="train", samples=4, weighs="letter", shots_split=None),
    Benchmark(name="hellaswag", source="hellaswag", split="validation", files=("hellaswag_validation",),
              scoring="likelihood", metric="acc_norm", wording="{question}"),
    Benchmark(name="mmlu_pro", source="mmlu_pro", files=("mmlu_pro_test",), weighs="letter",
              wording="{question}\nAnswer:", shots_split="validation"),
    Benchmark(name="arithmetic", source="arithmetic", format="r1_zero", arithmetic=ArithmeticOptions(count=500)),
)  # fmt: skip
BENCHMARKS: Registry[Benchmark] = Registry("benchmarks", Benchmark, {one.name: one for one in _OWN})


@dataclass(frozen=True)
class Loaded:
    """A benchmark and its problems as they are asked, options shuffled and written out."""

    benchmark: Benchmark
    problems: tuple[Problem, ...]
    part_of: str = ""
    """The benchmark that this is one data source of."""

    @property
    def name(self) -> str:
        return self.benchmark.name


def find_benchmark(spec: str | Mapping[str, Any] | Benchmark) -> Benchmark:
    """A benchmark by its name, a YAML file, `path.py:Name`, a data file, a hub dataset, or a mapping of a recipe."""
    if isinstance(spec, Benchmark):
        return spec if spec.name else spec.model_copy(update={"name": _name_of(spec.source)})
    if isinstance(spec, Mapping):
        return find_benchmark(from_options(Benchmark, spec, "a benchmark"))
    if spec == OF_ENVIRONMENT:
        return Benchmark(name=spec, source=spec, split="dev", format="own")
    registered: Benchmark | type[Benchmark] | None = BENCHMARKS.find(spec)
    if registered is not None:
        one = registered() if isinstance(registered, type) else registered
        source = spec if one.makes_problems else one.source
        return one.model_copy(update={"name": one.name or spec.rpartition(":")[2], "source": source})
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
        fix=f"{nearest(spec, BENCHMARKS.names())} (a data file, a hub dataset or a YAML entry will do as well)",
    )


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
    return _as_asked(benchmark, _problems(benchmark, data_dir, to_grade), limit)


def _problems(benchmark: Benchmark, data_dir: str | Path | None, to_grade: bool = True) -> list[Problem]:
    from lemma.core.types import problem_of
    from lemma.data.load_rows import load_problems, load_rows

    made = benchmark.problems()
    if made is not None:
        return list(made)
    source = source_of(benchmark, data_dir)
    problems = load_problems(source, 0) if to_grade else [problem_of(item) for item in load_rows(source, 0)]
    return [_without_system(problem) if _is_luffy(problem) else problem for problem in problems]


def load_parts(
    benchmark: Benchmark,
    *,
    limit: int | None,
    data_dir: str | Path | None,
    to_grade: bool = True,
    given: Sequence[Problem] | None = None,
) -> list[Loaded]:
    """A benchmark, or its data sources one by one, each with at most `limit` problems. `given` are problems that come
    from elsewhere."""
    problems = list(given) if given is not None else _problems(benchmark, data_dir, to_grade)
    parts = by_source(_as_asked(benchmark, problems, None))
    if not parts[0].part_of:
        return [_as_asked(benchmark, problems, limit)]
    return [replace(one, problems=tuple(_limited(one.problems, one.name, limit))) for one in parts]


def _as_asked(benchmark: Benchmark, problems: Sequence[Problem], limit: int | None) -> Loaded:
    kept = _limited(problems, benchmark.name, limit)
    if benchmark.scoring == "generate":
        kept = [shown(problem, benchmark.name) for problem in kept]
    return Loaded(benchmark, tuple(unique(kept)))


def _limited(problems: Sequence[Problem], name: str, limit: int | None) -> list[Problem]:
    """At most so many problems, from everywhere in the set, in their order."""
    if limit is None or limit >= len(problems):
        return list(problems)
    kept = sorted(permutation(len(problems), 0, "benchmark", name, "limit")[:limit].tolist())
    return [problems[place] for place in kept]


def _is_luffy(problem: Problem) -> bool:
    """Whether a row has the columns of LUFFY's files."""
    return "extra_info" in problem.extra


def by_source(loaded: Loaded) -> list[Loaded]:
    """One benchmark for each data source that the rows of a file name, or the benchmark itself where there is one.

    LUFFY's files repeat a row for each of its samples: copies become samples of one problem.
    """
    benchmark = loaded.benchmark
    sources = list(dict.fromkeys(problem.source for problem in loaded.problems))
    is_usual = len(sources) > 1 and all(map(_is_luffy, loaded.problems))
    if not (is_usual if benchmark.per_source is None else benchmark.per_source):
        return [loaded]
    return [_one_source(benchmark, source, loaded.problems) for source in sources]


def _one_source(benchmark: Benchmark, source: str, problems: Sequence[Problem]) -> Loaded:
    own = [problem for problem in problems if problem.source == source]
    by_content: dict[Any, Problem] = {}
    for problem in own:
        by_content.setdefault((problem.messages, problem.golds), problem)
    first = list(by_content.values())
    copies = len(own) // len(first)
    if copies * len(first) != len(own):
        first, copies = own, 1
    name = _name_of(source) or benchmark.name
    update: dict[str, Any] = {"name": name, "samples": max(copies, benchmark.samples)}
    if name in BENCHMARKS:
        update["rules"] = BENCHMARKS[name].rules
    return Loaded(benchmark.model_copy(update=update), tuple(first), benchmark.name)


def _without_system(problem: Problem) -> Problem:
    """LUFFY's files bring the system message of its training, which its own evaluation removes."""
    return replace(problem, messages=tuple(message for message in problem.messages if message.role != "system"))


def check_benchmark(spec: str | Mapping[str, Any] | Benchmark, *, data_dir: str | Path | None = None) -> None:
    """Refuse a benchmark whose files are not there, without reading them; the hub is not asked."""
    from lemma.data.sources import files_of

    benchmark = find_benchmark(spec)
    if not benchmark.makes_problems and benchmark.source != OF_ENVIRONMENT:
        files_of(source_of(benchmark, data_dir))


def example_source(benchmark: Benchmark, data_dir: str | Path | None) -> DataOptions:
    """Where solved examples come from, which are never the benchmark's own problems."""
    split = None if benchmark.makes_problems and benchmark.shots_source is None else benchmark.shots_split
    own = {name: getattr(benchmark, name) for name in SourceOptions.model_fields} | {"split": split or "train"}
    if benchmark.shots_source is not None:
        own |= {"source": benchmark.shots_source, "config": None, "revision": None}
    here = Path(own["source"]).expanduser()
    if here.is_file() and benchmark.shots_source is None:
        other = here.with_name(here.name.replace("test", split or "train").replace("validation", split or "train"))
        if other == here or not other.is_file():
            split = None
        own["source"] = str(other)
    if split is None:
        raise UserError(
            f"benchmark {benchmark.name} has no training data to take examples from",
            fix="leave --shots out, or write `shots_source` in a YAML entry of the benchmark",
        )
    if data_dir is not None and own["source"] != "arithmetic" and not here.exists():
        stems = benchmark.shots_files or tuple(stem.replace("test", split) for stem in benchmark.files)
        stems = (*stems, f"{benchmark.name}_{split}")
        own |= {"source": str(_file_in(Path(data_dir).expanduser(), stems, f"examples for {benchmark.name}"))}
        own |= {"config": None}
    return DataOptions(**own)


def source_of(benchmark: Benchmark, data_dir: str | Path | None) -> DataOptions:
    """Where its problems are: in the folder used instead of the hub, if one is given."""
    source = {name: getattr(benchmark, name) for name in SourceOptions.model_fields}
    if data_dir is not None and benchmark.source != "arithmetic" and not Path(benchmark.source).exists():
        stems = (*benchmark.files, benchmark.name)
        file = _file_in(Path(data_dir).expanduser(), stems, f"benchmark {benchmark.name}")
        source |= {"source": str(file), "config": None}
    return DataOptions(**source)


def _file_in(folder: Path, stems: Sequence[str], what: str) -> Path:
    """A file in the folder used instead of the hub, under one of these names."""
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist", fix="write --data-dir and a folder of data files")
    for stem in stems:
        for suffix in DATA_SUFFIXES:
            if (folder / f"{stem}{suffix}").is_file():
                return folder / f"{stem}{suffix}"
    raise UserError(
        f"{folder} has no file of {what}",
        fix=f"put it there as {stems[0]}.jsonl, or leave --data-dir out to take it from the hub",
    )


def unique(problems: Sequence[Problem]) -> list[Problem]:
    """Problems under ids that differ, also where a file repeats a row."""
    counts: Counter[str] = Counter()
    taken = {problem.id for problem in problems}
    found = []
    for problem in problems:
        counts[problem.id] += 1
        name, number = problem.id, counts[problem.id]
        if number > 1:
            while (name := f"{problem.id}#{number}") in taken:
                number += 1
            taken.add(name)
            counts[problem.id] = number
        found.append(problem if name == problem.id else replace(problem, id=name))
    return found
