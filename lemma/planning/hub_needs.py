"""What a plan has to ask the hub: the configuration of a model, and whether models and datasets are there at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lemma.core.errors import UserError
from lemma.core.hub_access import is_offline, looks_like_path, notice_offline
from lemma.data.data_options import DataOptions, SourceOptions, journal_place
from lemma.data.hub import hub_errors
from lemma.data.sources import BUILT_IN, files_of, hub_name
from lemma.evaluation.benchmarks import OF_ENVIRONMENT, find_benchmark, source_of
from lemma.models.model_options import ModelOptions
from lemma.models.places import TINY, resolve
from lemma.recipe import Recipe

CONFIG = "config.json"


def kept_config(model: ModelOptions) -> Path | None:
    """The configuration of a hub model in the cache of this machine; the hub is not asked."""
    if looks_like_path(model.path) or not (_hub_cache() / f"models--{model.path.replace('/', '--')}").is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.path, CONFIG, revision=model.revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def missing(recipe: Recipe, names: Iterable[str]) -> Iterator[str]:
    """A sentence for the model, and for each dataset of these stages, that can neither be found here nor be had.

    Of a hub model, the configuration is fetched, so that the plan can tell its shape.
    """
    try:
        _ask_for_model(recipe.model)
    except UserError as error:
        yield str(error)
    told = set()
    for name in names:
        for what, source in _hub_sources(recipe, name):
            sentence = _dataset_trouble(what, source)
            if sentence is not None and sentence not in told:
                told.add(sentence)
                yield f"stage {name}: {sentence}"


def _ask_for_model(model: ModelOptions) -> None:
    if model.path == TINY:
        return
    if Path(resolve(model.path)).exists() or kept_config(model) is not None:
        return
    notice_offline()
    if is_offline():
        raise UserError(
            f"the model {model.path} is not on this machine and the hub is switched off or out of reach",
            fix="check the name, or fetch it with `lemma download model`",
        )
    from huggingface_hub import hf_hub_download

    with hub_errors("model", model.path, model.revision):
        hf_hub_download(model.path, CONFIG, revision=model.revision)


def _hub_sources(recipe: Recipe, name: str) -> Iterator[tuple[str, SourceOptions]]:
    """What a stage reads from the hub, in words and as a source."""
    stage = recipe.stages[name]
    sources: list[tuple[str, SourceOptions]] = []
    validation = getattr(stage, "validation", None)
    for data in (getattr(stage, "data", None), getattr(validation, "data", None)):
        if isinstance(data, DataOptions):
            sources += [("the data", source) for source in data.mix or [data]]
    for one in stage.eval.benchmarks:
        benchmark = find_benchmark(one)
        if benchmark.makes_problems:
            continue
        try:
            sources.append((f"benchmark {benchmark.name}", source_of(benchmark, stage.eval.data_dir)))
        except UserError:
            continue  # the check of files says so
    for what, source in sources:
        try:
            is_here = (
                source.source in (*BUILT_IN, OF_ENVIRONMENT)
                or journal_place(source.source) is not None
                or files_of(source)
            )
        except UserError:
            continue
        if not is_here:
            yield what, source


def _dataset_trouble(what: str, source: SourceOptions) -> str | None:
    name = hub_name(source).path
    notice_offline()
    if is_offline():
        if _is_cached(name):
            return None
        return f"{what}: the dataset {name} is not on this machine and the hub is switched off or out of reach"
    from huggingface_hub import HfApi

    try:
        with hub_errors("dataset", name, source.revision):
            HfApi().dataset_info(name, revision=source.revision, timeout=10)
    except UserError as error:
        return f"{what}: {error}"
    return None


def _is_cached(name: str) -> bool:
    """Whether the `datasets` library, or the hub's client, has kept anything of this dataset."""
    tables = Path(os.environ.get("HF_DATASETS_CACHE") or _hub_home() / "datasets")
    owner, _, own = name.rpartition("/")
    kept = (
        tables / f"{owner}___{own}".lower(),
        tables / f"{owner}___{own}",
        _hub_cache() / f"datasets--{owner}--{own}",
    )
    return any(place.is_dir() for place in kept)


def _hub_home() -> Path:
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or usual).expanduser()


def _hub_cache() -> Path:
    """Where the hub's client keeps files. It takes longer to import than a plan takes."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or _hub_home() / "hub").expanduser()
