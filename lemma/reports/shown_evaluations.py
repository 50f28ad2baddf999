"""The evaluations of runs as the pages show them: every number with its interval, and problems gained and lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.files import from_json
from lemma.evaluation.comparison import Change, Comparison, EvalResult, compare, read_evaluation
from lemma.reports.run_reader import EvaluationPlace, RunReader

# Maximum number of problems listed on each side of a comparison.
LISTED = 40


def evaluation_rows(place: EvaluationPlace) -> list[dict[str, Any]]:
    """One row for each benchmark of an evaluation, and for each metric of an environment, from its results.json."""
    try:
        results = from_json((place.folder / "results.json").read_text(encoding="utf-8"))
        return [
            {"evaluation": place.name, "stage": place.stage, "step": place.step, "benchmark": name, **row}
            for name, result in results["benchmarks"].items()
            for row in _rows(result)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # half written or damaged: nothing to show


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    first = _row(result)
    measures = {name: result["scores"][name] for name in result.get("measures", ())}
    return [first, *({**first, "metric": name, **_interval(score)} for name, score in measures.items())]


def _interval(score: dict[str, Any]) -> dict[str, Any]:
    return {name: score[name] for name in ("value", "low", "high")}


def _row(result: dict[str, Any]) -> dict[str, Any]:
    headline, scores, settings = result["headline"], result["scores"], result["settings"]
    return {
        "metric": headline["metric"],
        **_interval(headline),
        "n": result["n"],
        "k": result["k"],
        "unknown": result["unknown"],
        "format": scores["format"]["value"],
        "truncated": scores["truncated"]["value"],
        "tokens": result["numbers"].get("tokens"),
        "reward": result["numbers"].get("reward"),
        "temperature": settings["temperature"],
        "turns": result["numbers"].get("turns"),
        "others": {name: score for name, score in scores.items() if name.startswith(("pass@", "maj@"))},
    }


@dataclass(frozen=True)
class Pair:
    """Two evaluations of the same kind to compare."""

    first: tuple[RunReader, EvaluationPlace]
    second: tuple[RunReader, EvaluationPlace]


def pairs_within(run: RunReader) -> list[Pair]:
    """For each stage, the first evaluation and the last; for whole models, each with the first of its kind."""
    pairs: list[Pair] = []
    series: dict[str, list[EvaluationPlace]] = {}
    alone: dict[str, list[EvaluationPlace]] = {}
    for place in run.evaluations():
        if place.stage:
            series.setdefault(place.stage, []).append(place)
        else:
            alone.setdefault(_kind(place.folder), []).append(place)
    for places in series.values():
        if len(places) > 1:
            pairs.append(Pair((run, places[0]), (run, places[-1])))
    for places in alone.values():
        pairs += [Pair((run, places[0]), (run, other)) for other in places[1:]]
    return pairs


def pairs_between(first: RunReader, second: RunReader) -> list[Pair]:
    """The last evaluation of each stage, and those of whole models, that two runs have under the same name."""
    mine, theirs = ({one.stage or one.name: one for one in run.evaluations()} for run in (first, second))
    return [Pair((first, mine[name]), (second, theirs[name])) for name in mine if name in theirs]


def _kind(folder: Path) -> str:
    """What two evaluations must share to be compared: the problems and how they were posed."""
    try:
        settings = from_json((folder / "settings.json").read_text(encoding="utf-8"))["benchmarks"]
        return json.dumps({name: (one["temperature"], one["n"], one["max_tokens"]) for name, one in settings.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return str(folder)


class Comparisons:
    """Comparisons as JSON, each computed once: a live page asks for them repeatedly."""

    def __init__(self) -> None:
        self._done: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def of(self, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
        return [row for pair in pairs for row in self._compared(pair)]

    def _compared(self, pair: Pair) -> list[dict[str, Any]]:
        (first_run, first), (second_run, second) = pair.first, pair.second
        key = str(first.folder), str(second.folder)
        if key not in self._done:
            try:
                one, other = read_evaluation(first.folder), read_evaluation(second.folder)
                rows = compare(one, other).rows
            except UserError:  # they share no problem, or one of them is damaged
                self._done[key] = []
                return []
            same = first_run is second_run
            names = [place.name if same else f"{run.name}: {place.name}" for run, place in (pair.first, pair.second)]
            self._done[key] = [_comparison(names, row, other) for row in rows]
        return self._done[key]


def _comparison(names: Sequence[str], row: Comparison, asked: EvalResult) -> dict[str, Any]:
    return {
        "a": names[0],
        "b": names[1],
        "benchmark": row.benchmark,
        "words": row.words,
        "first": row.test.first,
        "second": row.test.second,
        "problems": row.test.problems,
        "gained": row.test.gained,
        "lost": row.test.lost,
        "gained_list": [_change(change, row.benchmark, asked) for change in row.gained[:LISTED]],
        "lost_list": [_change(change, row.benchmark, asked) for change in row.lost[:LISTED]],
    }


def _change(change: Change, benchmark: str, asked: EvalResult) -> dict[str, Any]:
    question = asked.problems[benchmark][change.problem].question
    return {"problem": change.problem, "from": change.first, "to": change.second, "question": question[:300]}
