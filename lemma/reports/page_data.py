"""Everything on a page except the samples, as one JSON object; a live page asks only for what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lemma.cluster.cluster_options import ClusterOptions
from lemma.config.document import in_yaml, leaves
from lemma.core.errors import UserError
from lemma.core.files import from_json
from lemma.core.hub_access import looks_like_path
from lemma.core.ranks import slots_for
from lemma.core.version import lemma_version
from lemma.learning.learning_options import MOMENTS, USUAL_BUDGET
from lemma.models.memory import GIB, Shape, plan_training
from lemma.models.model_options import ModelOptions
from lemma.models.places import TINY, base_of_adapter, resolve
from lemma.reports.run_reader import RunReader
from lemma.reports.shown_evaluations import Comparisons, evaluation_rows, pairs_between, pairs_within
from lemma.runs.card_contamination import read_record
from lemma.runs.ingredients import cached_folder
from lemma.runs.run_folder import LAYOUT

VERSION = 1
# How many of the newest warnings of a run a page lists.
REMARKS = 200


class PageData:
    """The data of a page about some runs. `words` are the plain-text summaries of their recipes."""

    def __init__(self, runs: Sequence[RunReader], words: Sequence[str]):
        self.runs, self._words = list(runs), list(words)
        self._comparisons = Comparisons()

    def whole(self) -> dict[str, Any]:
        return self.since([None] * len(self.runs))

    def since(self, seen: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
        """`seen` tells for each run which rows the page has: {"generation": 0, "counts": {"grpo/train": 12}}."""
        runs = [self._run(run, words, before) for run, words, before in zip(self.runs, self._words, seen, strict=True)]
        pairs = [pair for run in self.runs for pair in pairs_within(run)]
        pairs += [pair for other in self.runs[1:] for pair in pairs_between(self.runs[0], other)]
        return {
            "version": VERSION,
            "lemma": lemma_version(),
            "made": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "runs": runs,
            "comparisons": self._comparisons.of(pairs),
            "differences": differences(self.runs),
        }

    def _run(self, run: RunReader, words: str, seen: Mapping[str, Any] | None) -> dict[str, Any]:
        run.look()
        counts: Mapping[str, int] = {}
        if seen is not None and seen.get("generation") == run.metrics.generation:
            counts = seen.get("counts") or {}
        facts = run.facts
        return {
            "name": run.name,
            "folder": str(run.folder),
            "state": run.state,
            "created": facts.get("created", ""),
            "heard": run.log.last_time,
            "facts": {name: str(value) for name, value in facts.items() if name != "digest"},
            "words": words,
            "recipe": yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True),
            "stages": [
                {
                    "name": name,
                    "kind": str(options.get("kind", "")) if isinstance(options, dict) else "",
                    "done": run.is_done(name),
                    "total": run.log.totals.get(name),
                    "planned_gib": planned_gib(run.folder, run.recipe, name),
                }
                for name, options in run.stages.items()
            ],
            "generation": run.metrics.generation,
            "curves": {
                f"{stage}/{axis}": {
                    "from": counts.get(f"{stage}/{axis}", 0),
                    **curves.after(counts.get(f"{stage}/{axis}", 0)),
                }
                for (stage, axis), curves in run.metrics.curves.items()
            },
            "remarks": [
                {"time": one.time, "level": one.level, "stage": one.stage, "step": one.step, "text": one.text}
                for one in run.log.remarks[-REMARKS:]
            ],
            "evaluations": [row for place in run.evaluations() for row in evaluation_rows(place)],
            "contamination": _contamination(run),
            "chunks": [{"key": one.key, "source": one.source, "step": one.step} for one in run.chunks()],
        }


def _contamination(run: RunReader) -> dict[str, Any] | None:
    """The contamination findings of the last finished stage, for the data of all stages up to it."""
    return next((found for name in reversed(run.stages) if (found := read_record(run.folder, name))), None)


def differences(runs: Sequence[RunReader]) -> list[dict[str, Any]]:
    """The options in which the recipes of several runs differ; where a run lives does not count. A part of the recipe
    that a run lacks altogether, such as a stage, is one line."""
    if len(runs) < 2:
        return []
    recipes = _without_empty_blocks([leaves(run.recipe) for run in runs])
    rows: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for own in recipes for key in own):
        values = [in_yaml(own[key]) if key in own else _absent(own, key) for own in recipes]
        if key == "run.dir" or len(set(values)) == 1:
            continue
        missing = [value for own, value in zip(recipes, values, strict=True) if key not in own]
        if missing and missing[0] != key:
            rows[missing[0]] = ["not there" if key not in own else "there" for own in recipes]
        else:
            rows[key] = ["not there" if key not in own else in_yaml(own[key]) for own in recipes]
    return [{"key": key, "values": values} for key, values in rows.items()]


def _without_empty_blocks(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is null in one recipe and a block of options in another, such as `model.lora`, is not there in the first."""
    around = {key.rpartition(".")[0] for own in recipes for key in own}
    return [{key: value for key, value in own.items() if value is not None or key not in around} for own in recipes]


def _absent(own: Mapping[str, Any], key: str) -> str:
    """The largest block around this option that is missing entirely."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        part = ".".join(parts[:length])
        if not any(name == part or name.startswith(f"{part}.") for name in own):
            return part
    return key


RECORDED = ("ranks", "shard", "token_budget", "recomputed")


def planned_gib(run: Path, recipe: Mapping[str, Any], stage: str) -> float | None:
    """The peak of an update by the plan, without the engine's cache; None where the model's shape is not known."""
    try:
        model = ModelOptions(**recipe["model"])
        options = recipe["stages"][stage]
        shape = Shape.of_tiny(model.tiny) if model.path == TINY else _shape(run, stage, model.path)
        precision = model.precision or ("fp32" if recipe["run"]["device"] == "cpu" else "bf16")
        moments = MOMENTS[options["optim"]["name"]]
        on_cpu = recipe["run"]["device"] == "cpu"
        layout = _layout(run, recipe, stage)
        budget = layout.pop("token_budget") or options["batch"]["token_budget"] or USUAL_BUDGET
        plan = plan_training(shape, model, precision, budget, moments=moments, on_cpu=on_cpu, **layout)
        return plan.total / GIB
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError, UserError):
        return None


def _layout(run: Path, recipe: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Ranks, the slots of one, what they split, tokens at a time and recomputed blocks, as the stage recorded them at
    its start; before that, as far as the recipe tells."""
    path = run / "stages" / stage / LAYOUT
    if path.is_file():
        found = from_json(path.read_text(encoding="utf-8"))
        layout = {name: str(found[name]) if name == "shard" else int(found[name]) for name in RECORDED}
        return layout | {"slots": -(-int(found.get("slots", 1)) // int(found["ranks"]))}
    cluster = ClusterOptions(**(recipe.get("cluster") or {}))
    shard = cluster.shard
    if shard == "auto":
        shard = "none" if recipe["run"]["device"] == "cpu" else "optimiser"
    ranks = cluster.ranks or 1
    return {
        "ranks": ranks,
        "slots": -(-(cluster.slots or slots_for(ranks, _slot_servers(recipe))) // ranks),
        "shard": shard,
        "token_budget": None,
    }


def _slot_servers(recipe: Mapping[str, Any]) -> int:
    """As `slot_servers` of run_options, of a recipe that is not read as one."""
    rollouts = [stage.get("rollout") or {} for stage in recipe["stages"].values()]
    engines = [one.get("engine") or {} for one in rollouts if one.get("lag") != "flying"]
    named = [engine.get("servers", 0) for engine in engines if engine.get("name") == "native"]
    return max((one if isinstance(one, int) else len(one) for one in named), default=0)


def _shape(run: Path, stage: str, path: str) -> Shape:
    final = run / "stages" / stage / "final"
    place = resolve(path)
    base = base_of_adapter(place) or place
    cached = None if looks_like_path(base) else cached_folder(base)
    for folder in filter(None, (final / "merged", final, Path(base).expanduser(), cached)):
        if (folder / "config.json").is_file():
            return Shape.of_config(from_json((folder / "config.json").read_text(encoding="utf-8")))
    raise KeyError(path)
