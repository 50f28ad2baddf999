"""What a model card says about contamination: does the training data of the stages behind a model repeat problems of
the benchmarks that it was measured on? Small local files are checked when a stage ends, in seconds, and the result is
kept in the run folder; `lemma export --contamination` checks the rest."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.files import from_json, write_whole
from lemma.data.data_options import DataOptions, journal_place
from lemma.data.sources import ARITHMETIC, BUILT_IN
from lemma.evaluation.benchmarks import OF_ENVIRONMENT, Benchmark, find_benchmark
from lemma.evaluation.stage_data import Checked

FILE = "contamination.json"
MADE = "the problems are made by rule; those of the test split are never among them"
GAMES = "the problems are made by rule"
OF_WORLD = "the problems are its environment's own, and were not compared"
OWN = "its own samples, of the problems of the stages before"
UNCHECKED = "not compared; `lemma export RUN --contamination` does it"
UNREAD = "not compared, because its data or a benchmark could not be read here"

# One stage: the result in words, or why it was not checked.
Found = dict[str, Any]


def read_record(run: Path, stage: str) -> dict[str, Any] | None:
    """What was found when the stage ended."""
    try:
        record = from_json((run / "stages" / stage / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("stages"), dict) else None


def write_record(run: Path, stage: str, record: Mapping[str, Any]) -> None:
    write_whole(run / "stages" / stage / FILE, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def check_stages(
    stages: Mapping[str, Mapping[str, Any]], seed: int, *, against: Sequence[str] | None = None, is_asked: bool = False
) -> dict[str, Any]:
    """Compare the data of each stage with the benchmarks that any of them is measured on, or with those `against`.

    Unless `is_asked`, only small local files are compared, and unreadable data is not an error.
    """
    benchmarks, data_dir = _measured(stages, against)
    found = {
        name: _of_stage(name, options, benchmarks, data_dir, seed, is_asked)
        for name, options in stages.items()
        if options.get("data")
    }
    return {"benchmarks": [one.name for one in benchmarks], "stages": found}


def _measured(
    stages: Mapping[str, Mapping[str, Any]], against: Sequence[str] | None
) -> tuple[list[Benchmark], str | None]:
    """The benchmarks, each once, and the folder used instead of the hub."""
    specs: list[Any] = list(against or [])
    data_dir = None
    for options in stages.values():
        measured = options.get("eval") or {}
        specs += measured.get("benchmarks", []) if against is None else []
        data_dir = data_dir or measured.get("data_dir")
    known = [_found(spec, against is not None) for spec in specs]
    return list({one.name: one for one in known if one and one.source != OF_ENVIRONMENT}.values()), data_dir


def _found(spec: Any, is_asked: bool) -> Benchmark | None:
    """A benchmark's file may be gone by now; a final model must still get its card."""
    try:
        return find_benchmark(spec)
    except (UserError, OSError):
        if is_asked:
            raise
        return None


def _of_stage(
    name: str, options: Mapping[str, Any], benchmarks: list[Benchmark], data_dir: str | None, seed: int, is_asked: bool
) -> Found:
    data = DataOptions.model_validate(options["data"])
    sources = [one.source for one in data.mix or [data]]
    if all(source in BUILT_IN for source in sources):
        return {"words": MADE if set(sources) == {ARITHMETIC} else GAMES}
    if OF_ENVIRONMENT in sources:
        return {"words": OF_WORLD}
    if all(journal_place(source) is not None for source in sources):
        return {"words": OWN}
    if not benchmarks:
        return {"words": UNCHECKED}
    checked = Checked(name, data, benchmarks, data_dir)
    try:
        if not is_asked and not checked.is_small:
            return {"words": UNCHECKED}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the stage has already reported on its data
            contamination = checked.check(seed)[1]
    except (UserError, OSError):
        if is_asked:
            raise
        return {"words": UNREAD}
    flagged, rows = len(contamination.flagged), contamination.rows
    return {
        "words": f"{flagged:,} of {rows:,} rows repeat a problem"
        if flagged
        else f"none of {rows:,} rows repeats a problem",
        "rows": rows,
        "flagged": flagged,
        "benchmarks": [one.words for one in contamination.counts],
    }


def in_words(record: Mapping[str, Any] | None) -> str:
    """The section of the card."""
    if record is None or not record["stages"]:
        return f"The training data was {UNCHECKED}."
    names = ", ".join(record["benchmarks"])
    lines = [
        f"Training data against {names}:" if names else "No benchmark was named to compare the training data with.",
        "",
    ]
    for stage, found in record["stages"].items():
        lines.append(f"- {stage}: {found['words']}")
        lines += [f"  - {words}" for words in found.get("benchmarks", [])]
    if any("rows" in found for found in record["stages"].values()):
        lines += ["", "A repeat is the same text, or most of its words in the same order; paraphrases are not found."]
    return "\n".join(lines)
