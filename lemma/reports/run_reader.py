"""One run, as the pages and tables see it: everything is read through here, and only new data is read again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemma.config.document import read
from lemma.core.errors import UserError
from lemma.core.files import from_json
from lemma.evaluation.results import is_complete
from lemma.reports.curves import Metrics
from lemma.reports.run_state import Log, State, check_is_run, state_of
from lemma.reports.shown_samples import first_groups, journal_steps, read_chunk, read_evaluation_chunk
from lemma.reports.token_texts import TokenTexts, load_token_texts
from lemma.rollouts.journal_reader import step_journals
from lemma.rollouts.notes_reader import read_notes
from lemma.rollouts.token_notes import NOTES
from lemma.runs.run_folder import refuse_odd_files
from lemma.runs.run_options import STAGE_NAME


@dataclass(frozen=True)
class EvaluationPlace:
    """A finished evaluation in a run; `stage` and `step` if it was made during a stage."""

    name: str
    folder: Path
    stage: str = ""
    step: int = 0


@dataclass(frozen=True)
class ChunkPlace:
    """Where the samples of one step, or of one evaluation, are."""

    key: str
    source: str
    step: int
    path: Path
    is_evaluation: bool = False


class RunReader:
    """Reads a run folder; `look` takes in what came since the last time."""

    def __init__(self, folder: Path, name: str | None = None):
        check_is_run(folder)
        refuse_odd_files(folder)
        self.folder, self.name = folder, name or folder.resolve().name
        self.recipe = _read_recipe(folder)
        stages = self.recipe.get("stages")
        # Names are joined to paths; what a recipe would refuse as the name of a stage is none here either.
        self.stages: dict[str, dict[str, Any]] = {
            name: options
            for name, options in (stages.items() if isinstance(stages, dict) else ())
            if re.fullmatch(STAGE_NAME, str(name)) and isinstance(options, dict)
        }
        self.metrics = Metrics(folder / "metrics.jsonl")
        self.log = Log(folder / "run.log")
        self._tokens: TokenTexts | None = None
        self._sought_tokens = False

    def look(self) -> None:
        self.metrics.look()
        self.log.look()

    @property
    def state(self) -> State:
        return state_of(self.folder, list(self.stages), self.log.ending)

    @property
    def facts(self) -> dict[str, Any]:
        try:
            facts = from_json((self.folder / "run.json").read_text())
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def is_done(self, stage: str) -> bool:
        return (self.folder / "stages" / stage / "done.json").is_file()

    def evaluations(self) -> list[EvaluationPlace]:
        """Those of stages in the order of their steps, then those that were made of whole models, by age."""
        numbered, others = [], []
        for folder in sorted((self.folder / "evaluations").glob("*")):
            if is_complete(folder):
                others.append(EvaluationPlace(folder.name, folder))
            for inner in sorted(folder.glob("step-*")):
                number = inner.name.removeprefix("step-")
                if number.isdecimal() and is_complete(inner):
                    name = f"{folder.name}, step {int(number)}"
                    numbered.append(EvaluationPlace(name, inner, folder.name, int(number)))
        return numbered + sorted(others, key=lambda one: (one.folder / "results.json").stat().st_mtime)

    def chunks(self) -> list[ChunkPlace]:
        """Everything that was sampled, as locations to read from."""
        places = [
            ChunkPlace(f"{stage}/{step}", stage, step, path)
            for stage in self.stages
            for step, path in journal_steps(self.folder, stage).items()
        ]
        for one in self.evaluations():
            source = f"evaluation during {one.stage}" if one.stage else f"evaluation {one.name}"
            places.append(ChunkPlace(f"{source}/{one.step}", source, one.step, one.folder, is_evaluation=True))
        return places

    def read(self, place: ChunkPlace, longest: int | None = None, most: int | None = None) -> dict[str, Any]:
        """The samples of a step or an evaluation; `most` of them, and the rest of their group."""
        if place.is_evaluation:
            return first_groups(read_evaluation_chunk(place.path, longest), most)
        folder = place.path.parent
        notes = read_notes(folder.with_name(NOTES), place.step)
        return read_chunk(step_journals(folder, place.step), self.tokens, longest, most, notes)

    @property
    def tokens(self) -> TokenTexts | None:
        """Looked for once; a run that has just begun may have no tokenizer on disk yet."""
        if not self._sought_tokens:
            model = self.recipe.get("model")
            path = str(model.get("tokenizer") or model.get("path")) if isinstance(model, dict) else ""
            self._tokens = load_token_texts(self.folder, list(self.stages), path)
            self._sought_tokens = self._tokens is not None
        return self._tokens


def _read_recipe(folder: Path) -> dict[str, Any]:
    path = folder / "recipe.yaml"
    try:
        return read(path).data
    except UserError as error:
        raise UserError("the recipe of this run cannot be read", file=path, fix="restore it") from error


def open_runs(folders: list[Path]) -> list[RunReader]:
    """Readers with unique names: the folder's own, with its parents if two are the same."""
    names = [folder.resolve().name for folder in folders]
    return [
        RunReader(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]
