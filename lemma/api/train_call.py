"""`lemma.train`: a recipe in, a run out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lemma.api.run_result import Run
from lemma.config.document import read
from lemma.config.load import load_values
from lemma.config.registry import check_not_imported, forget_files, hand_over
from lemma.core.errors import UserError
from lemma.core.events import Event
from lemma.core.files import write_whole
from lemma.recipe import Recipe, load_recipe
from lemma.runs.run_options import RunOptions


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Mapping[str, Any] | None = None,
    *,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    fresh: bool = False,
    console: bool = True,
    listen: Callable[[Event], None] | None = None,
) -> Run:
    """Run the stages of a recipe, or go on where the run stopped. The same as `lemma train`.

    The recipe is a file, a `Recipe`, or a mapping with its content, in which functions and classes may stand for their
    `path.py:name`, and rows for the `source` of data; `overrides` are values by path, such as
    `{"stages.sft.optim.lr": 1e-5}`. `listen` hears every event of the run. Under torchrun, all processes share the run.
    """
    from lemma.cluster.joining import member, report_early_exit
    from lemma.reporting import sink_of
    from lemma.runs.run import train as run_stages

    check_not_imported("lemma.train")
    forget_files()
    try:
        wanted = _recipe(recipe, overrides or {})
    except UserError as error:
        report_early_exit(str(error))
        raise
    place = member(wanted.cluster, wanted.run.device, wanted.shared_settings(), Path(wanted.run.dir))
    with place, sink_of(wanted, console=console) as sink:

        def hear(event: Event) -> None:
            sink(event)
            if listen is not None:
                listen(event)

        run_stages(wanted, skip=skip, only=only, fresh=fresh, sink=hear)
    return Run(wanted.run.dir)


def _recipe(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Mapping[str, Any]) -> Recipe:
    run_dir = str(overrides.get("run.dir") or _run_dir(recipe))
    kept = {path: _kept(value, path.rpartition(".")[2], run_dir) for path, value in overrides.items()}
    texts = [f"{path}={json.dumps(value, default=str)}" for path, value in kept.items()]
    if isinstance(recipe, str | Path):
        return load_recipe(recipe, texts)
    if isinstance(recipe, Recipe):
        return load_values(Recipe, recipe.model_dump(mode="json"), texts) if texts else recipe
    return load_values(Recipe, _kept(recipe, "", run_dir), texts)


def _run_dir(recipe: str | Path | Mapping[str, Any] | Recipe) -> str:
    if isinstance(recipe, Recipe):
        return recipe.run.dir
    run = (recipe if isinstance(recipe, Mapping) else read(recipe).data).get("run")
    given = run.get("dir") if isinstance(run, Mapping) else None
    return str(given or RunOptions().dir)


def _kept(value: Any, key: str, run_dir: str) -> Any:
    """What a recipe says, with `path.py:name` for each function and class that stands in it, and a file for rows."""
    if key == "source" and are_rows(value):
        return write_rows(value, run_dir)
    if isinstance(value, Mapping):
        return {name: _kept(inner, str(name), run_dir) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_kept(inner, "", run_dir) for inner in value]
    return hand_over(value) if callable(value) else value


FOLDER_ENDING = ".rows"


def are_rows(value: Any) -> bool:
    """Whether a value is meant as rows and not as the name of a source."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | BaseModel)


def write_rows(rows: Iterable[Any], run_dir: str) -> str:
    """The file that holds these rows from now on, next to the run folder; its name follows from its content.

    So the same rows are the same data for a run that goes on, and others are other data.
    """
    lines = [_line(row, number) for number, row in enumerate(_mappings(rows), start=1)]
    if not lines:
        raise UserError("`source` holds no rows", fix="give at least one")
    content = "".join(lines)
    folder = Path(f"{run_dir.rstrip('/')}{FOLDER_ENDING}").expanduser()
    path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return str(path)


def _mappings(rows: Any) -> Iterable[Any]:
    """A DataFrame iterates over the names of its columns, and has NaN for what is missing."""
    if not hasattr(rows, "iterrows"):
        return rows
    return rows.astype(object).where(rows.notna(), None).to_dict("records")


def _line(row: Any, number: int) -> str:
    if not isinstance(row, Mapping):
        raise UserError(
            f"row {number} of `source` is {row!r:.80}, not a mapping",
            fix='write rows such as {"question": "...", "answer": "..."}',
        )
    try:
        return json.dumps(dict(row), ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(
            f"row {number} of `source` cannot be kept in a file: {error}", fix="write text, numbers, lists and mappings"
        ) from error
