"""A stage's data against the benchmarks that it is measured on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from lemma.core.errors import UserError
from lemma.core.types import Problem, problem_of
from lemma.data.contamination import LONG, find_matches, words_of
from lemma.data.data_options import DataOptions
from lemma.data.prepared import item_rows, write_rows
from lemma.data.readers import Item
from lemma.evaluation.benchmarks import DATA_SUFFIXES, Benchmark, Loaded, find_benchmark, load_benchmark

if TYPE_CHECKING:
    from lemma.recipe import Recipe

SMALL = 64 << 20
"""Files of less text in all are read without being asked."""
COMPRESSED, COMPRESSION = (".gz", ".parquet"), 8
# Characters of a text that are shown.
SHOWN = 160


@dataclass(frozen=True)
class Checked:
    """A stage's data and the benchmarks to compare it with."""

    name: str
    data: DataOptions
    benchmarks: list[Benchmark]
    data_dir: str | None

    def check(self, seed: int) -> tuple[list[Item], Contamination]:
        from lemma.data.load_rows import load_rows

        items = load_rows(self.data, seed)
        loaded = [load_benchmark(one, data_dir=self.data_dir, to_grade=False) for one in self.benchmarks]
        return items, check_rows([problem_of(item) for item in items], loaded)

    @property
    def is_small(self) -> bool:
        """Whether everything is in files on this machine that take seconds to read."""
        from lemma.data.sources import ARITHMETIC, files_of

        size = 0
        for source in self.data.mix or [self.data]:
            files = [] if source.source == ARITHMETIC else files_of(source)
            if not files:
                return False
            size += sum(_text_size(path) for path in files)
        for benchmark in self.benchmarks:
            path = _local(benchmark, self.data_dir)
            if path is None:
                return False
            size += _text_size(path)
        return size <= SMALL


def stages_with_benchmarks(recipe: Recipe, against: Sequence[str] | None, data_dir: str | None) -> Iterator[Checked]:
    """The stages that have data and something to compare it with."""
    for name, stage in recipe.stages.items():
        data, measured = getattr(stage, "data", None), getattr(stage, "eval", None)
        names = against if against is not None else getattr(measured, "benchmarks", [])
        if data is not None and names:
            folder = data_dir or getattr(measured, "data_dir", None)
            yield Checked(name, data, [find_benchmark(one) for one in names], folder)


def check_source(
    options: DataOptions, against: Sequence[str], data_dir: str | None, seed: int
) -> tuple[list[Item], Contamination]:
    """The rows of one source, compared with these benchmarks."""
    return Checked("", options, [find_benchmark(one) for one in against], data_dir).check(seed)


def write_clean(path: Path, items: Sequence[Item], contamination: Contamination) -> int:
    """Write the rows that repeat nothing; how many they are."""
    kept = [item for place, item in enumerate(items) if place not in contamination.flagged]
    if not kept:
        raise UserError("every row repeats a problem of a benchmark", fix="choose other data")
    write_rows(path, item_rows(kept))
    return len(kept)


def repeats_in_words(
    recipe: Recipe, against: Sequence[str] | None, data_dir: str | None, *, is_asked: bool
) -> Iterator[str]:
    """For each stage what its data repeat of its benchmarks, where that is cheap to know or was asked for."""
    for stage in stages_with_benchmarks(recipe, against, data_dir):
        names = ", ".join(benchmark.name for benchmark in stage.benchmarks)
        try:
            contamination = stage.check(recipe.run.seed)[1] if is_asked or stage.is_small else None
        except UserError:
            if is_asked:
                raise
            contamination = None
        if contamination is None:
            if stage.data.mix or stage.data.source != "arithmetic":
                yield f"\n{stage.name}: data not compared with {names}; --check-data does it"
        elif not contamination.flagged:
            yield f"\n{stage.name}: no row repeats a problem of {names}"
        else:
            rows = f"{len(contamination.flagged):,} of {contamination.rows:,} rows"
            yield f"\nWARNING: {stage.name}: {rows} repeat problems of its benchmarks"
            yield from (f"  {count.words}" for count in contamination.counts if count.repeated)
            yield "  `lemma data check SOURCE --against BENCHMARKS --clean FILE` writes the rows that repeat nothing"


def found_in_words(items: Sequence[Item], contamination: Contamination, show: int) -> Iterator[str]:
    """What rows repeat, and the first such pairs with their texts."""
    for count in contamination.counts:
        yield f"  {count.words}"
    yield f"  {len(contamination.flagged):,} of {contamination.rows:,} rows repeat a problem"
    for repeat in sorted(contamination.repeats, key=lambda repeat: (repeat.kind != "exact", -repeat.share))[:show]:
        share = "the same" if repeat.kind == "exact" else f"{repeat.share:.0%} of its n-grams"
        row = problem_of(items[repeat.row])
        yield f"\n  row {repeat.row + 1} ({row.id}) and {repeat.benchmark} {repeat.problem.id}: {share}"
        for text in (row.question, repeat.problem.question):
            flat = " ".join(text.split())
            yield f"    {flat if len(flat) <= SHOWN else flat[:SHOWN] + ' ...'}"


def _text_size(path: Path) -> int:
    """About how much text a file holds."""
    return path.stat().st_size * (COMPRESSION if path.suffix in COMPRESSED else 1)


def _local(benchmark: Benchmark, data_dir: str | None) -> Path | None:
    """The file of a benchmark on this machine."""
    places = [Path(benchmark.source).expanduser()]
    if data_dir is not None:
        stems = (*benchmark.files, benchmark.name)
        places += [Path(data_dir).expanduser() / f"{stem}{suffix}" for stem in stems for suffix in DATA_SUFFIXES]
    return next((place for place in places if place.is_file()), None)


class Repeat(NamedTuple):
    """A training row, by place, and the benchmark problem that it repeats."""

    row: int
    benchmark: str
    problem: Problem
    kind: Literal["exact", "overlap"]
    share: float


@dataclass(frozen=True, slots=True)
class Count:
    """What one benchmark has in common with the data."""

    benchmark: str
    problems: int
    exact_rows: int
    overlap_rows: int
    repeated: int
    """Problems of the benchmark that at least one row repeats."""

    @property
    def words(self) -> str:
        if not self.repeated:
            return f"{self.benchmark}: none of its {self.problems:,} problems is in the data"
        repeats = f"{self.repeated:,} of its {self.problems:,} problems ({self.repeated / self.problems:.1%})"
        rows = f"rows word for word: {self.exact_rows:,}, nearly so: {self.overlap_rows:,}"
        return f"{self.benchmark}: {repeats} found in the data; {rows}"


@dataclass(frozen=True, slots=True)
class Contamination:
    """Which of `rows` training rows repeat problems of benchmarks."""

    rows: int
    repeats: tuple[Repeat, ...]
    counts: tuple[Count, ...]

    @property
    def flagged(self) -> frozenset[int]:
        return frozenset(repeat.row for repeat in self.repeats)


def check_rows(rows: Sequence[Problem], benchmarks: Sequence[Loaded]) -> Contamination:
    """Compare every training row with every problem of every benchmark."""
    owners = [(loaded.name, problem) for loaded in benchmarks for problem in loaded.problems]
    matches = find_matches([asked(row) for row in rows], [asked(problem) for _, problem in owners])
    repeats = tuple(Repeat(match.row, *owners[match.problem], match.kind, match.share) for match in matches)
    return Contamination(len(rows), repeats, tuple(_count(loaded, repeats) for loaded in benchmarks))


def _count(loaded: Loaded, repeats: Sequence[Repeat]) -> Count:
    own = [repeat for repeat in repeats if repeat.benchmark == loaded.name]
    exact = {repeat.row for repeat in own if repeat.kind == "exact"}
    near = {repeat.row for repeat in own} - exact
    return Count(loaded.name, len(loaded.problems), len(exact), len(near), len({repeat.problem.id for repeat in own}))


def asked(problem: Problem) -> str:
    """What a problem asks. Options count where the question alone says little, in the order of the alphabet, because
    benchmarks draw theirs."""
    if not problem.choices:
        return " ".join(message.content for message in problem.messages if message.role == "user")
    question = problem.question.rpartition(f"\n\nA) {problem.choices[0]}")[0] or problem.question
    if len(words_of(question)) >= LONG:
        return question
    return "\n".join([question, *sorted(problem.choices)])
