"""Where a model is: a folder, a run, an adapter, a GGUF file, or a name of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from lemma.config.document import read as read_document
from lemma.core.errors import UserError, nearest
from lemma.core.hub_access import looks_like_path

TINY = "tiny"


def resolve(path: str) -> str:
    """What to load from: a run folder stands for the model of the last stage that is finished, a folder for the GGUF
    file in it, anything else for itself."""
    folder = Path(path).expanduser()
    if _is_run(folder):
        done = [p for p in (folder / "stages").glob("*/final") if _model_in(p)]
        if not done:
            raise UserError(
                f"the run {path} has no finished model yet", fix=f"finish it, or make one with `lemma export {path}`"
            )
        stages = _stages_of(folder / "recipe.yaml", (folder / "recipe.yaml").stat().st_mtime_ns) if done[1:] else ()
        folder = max(done, key=lambda p: (_place(stages, p.parent.name), p.stat().st_mtime))
    inner = _model_in(folder)
    if inner is not None:
        return str(inner)
    file = find_gguf(folder)
    if file is not None:
        return str(file)
    if folder.is_dir():
        raise UserError(f"the folder {path} holds no model", fix="give a folder with a config.json or a .gguf file")
    if looks_like_path(path) or path.endswith(".gguf"):
        siblings = [p.name for p in folder.parent.glob("*") if _is_run(p) or _model_in(p) or _has_gguf(p)]
        written = path.rstrip("/")
        fix = nearest(folder.name, siblings, prefix=written[: len(written) - len(folder.name)])
        raise UserError(f"there is no model folder {path}", fix=fix)
    return path


def _has_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" or any(path.glob("*.gguf"))


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() and ((folder / "stages").is_dir() or (folder / "run.json").is_file())


@lru_cache(maxsize=8)
def _stages_of(recipe: Path, changed: int) -> tuple[str, ...]:
    """The stages of a recipe in their order; it is read once, since that takes a tenth of a second."""
    try:
        return tuple(read_document(recipe).data.get("stages") or {})
    except UserError:
        return ()


def _place(stages: Sequence[str], stage: str) -> int:
    """The position of a stage in its recipe: copying a folder changes the times of its files, not their order."""
    return stages.index(stage) if stage in stages else -1


def _model_in(folder: Path) -> Path | None:
    for place in (folder, folder / "merged", folder / "adapter"):
        if (place / "config.json").is_file() or (place / "adapter_config.json").is_file():
            return place
    return None


def lasting(source: str) -> str:
    """The name of a base model as an adapter remembers it, which is read from any folder: paths are absolute."""
    if source == TINY:
        return source
    place = resolve(source)
    return str(Path(place).resolve()) if Path(place).exists() else place


def base_of_adapter(folder: str) -> str | None:
    """The base model that an adapter folder names, or None where the folder holds a whole model."""
    base = below = _named_base(folder)
    seen = {Path(folder).resolve()}
    while below is not None and Path(below).expanduser().is_dir():
        place = Path(resolve(below))
        if place.resolve() in seen:
            raise UserError(f"the adapter {folder} names itself as its base", file=Path(folder) / "adapter_config.json",
                            fix="write the model that it was trained on as base_model_name_or_path")  # fmt: skip
        seen.add(place.resolve())
        below = _named_base(str(place))
    return base


def _named_base(folder: str) -> str | None:
    settings = Path(folder) / "adapter_config.json"
    if not settings.is_file() or (Path(folder) / "config.json").is_file():
        return None
    try:
        base = json.loads(settings.read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str):
        raise UserError("this file does not name the base model of the adapter", file=settings,
                        fix="write it as base_model_name_or_path")  # fmt: skip
    if base == TINY:
        raise UserError(f"{folder} is an adapter of the built-in model", fix="load the merged model next to it")
    return _where_its_run_is(Path(folder), base)


def _where_its_run_is(adapter: Path, base: str) -> str:
    """The base of an adapter, which may be the model of another stage of a run whose folder was moved since."""
    stages = next((place for place in adapter.resolve().parents if place.name == "stages"), None)
    below = Path(base).parts[-3:]  # the stage, `final`, `merged`
    if stages is None or Path(base).parent.parent.parent.name != "stages" or Path(base).exists():
        return base
    moved = stages.joinpath(*below)
    return str(moved) if moved.exists() else base


GGUF_MAGIC = b"GGUF"


MANY = 8
GGUF_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
# A vision encoder may lie next to a language model.
ENCODERS = "mmproj"


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only one in a folder."""
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix != ".gguf" and not _has_magic(place):
            raise UserError(f"{path} is a file, not a model", fix="give a folder with a config.json, or a .gguf file")
        files = [place]
    else:
        files = sorted(file for file in place.glob("*.gguf") if not file.name.startswith(ENCODERS))
    if not files:
        return None
    parts = GGUF_PART.search(files[0].name)
    if parts and parts[1] != "00001":
        raise UserError(
            f"{files[0]} is one of {int(parts[1])} pieces", fix="put them together with `llama-gguf-split --merge`"
        )
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:MANY]) + (", ..." if len(files) > MANY else "")
        raise UserError(f"the folder {path} holds {len(files)} models: {names}", fix=f"name one, such as {files[0]}")
    return files[0]


def _has_magic(file: Path) -> bool:
    with file.open("rb") as handle:
        return handle.read(len(GGUF_MAGIC)) == GGUF_MAGIC
