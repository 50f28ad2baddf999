"""A stage's data against the benchmarks that it is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lemma.data.data_options import DataOptions
from lemma.data.readers import Item, problem_of
from lemma.evaluation.benchmarks import DATA_SUFFIXES, Benchmark, load_benchmark
from lemma.evaluation.repeated import Contamination, check_rows

SMALL = 64 << 20
"""Files of less text in all are read without being asked."""
COMPRESSED, COMPRESSION = (".gz", ".parquet"), 8


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
