"""What a stage depends on besides its data: base weights, rewards, custom code. A resumed run must find the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.config.registry import outside_files
from lemma.learning.manifest import fingerprint
from lemma.models.model_options import ModelOptions
from lemma.models.places import TINY, base_of_adapter, resolve

if TYPE_CHECKING:
    from lemma.runs.run_options import StageOptions

BASE = "the base model"
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "config.json", "adapter_config.json")


def ingredients(
    options: StageOptions, model: ModelOptions, start_from: Path | None, fmt: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """A fingerprint of each, by a readable name. A checkpoint with all weights needs no base, unless the base is a
    reference."""
    marks = {}
    algorithm = getattr(options, "algorithm", None)
    if model.lora is not None or getattr(algorithm, "needs_reference", False):
        source = str(start_from) if start_from is not None else model.path
        if source != TINY:
            marks[BASE] = mark_of(_weights(resolve(source)))
    for what, place in models_beside(options).items():
        if place != TINY:
            marks[what] = mark_of(_weights(resolve(place)))
    for number, reward in enumerate(getattr(options, "rewards", ())):
        files = reward.files
        if files:
            marks[f"what reward {number + 1} ({reward.label}) is computed from"] = mark_of(files)
    return marks | code_marks(options, fmt)


def models_beside(options: StageOptions) -> dict[str, str]:
    """The models with a path of their own that a stage loads besides its policy."""
    reference = getattr(options, "reference_model", None)
    paths = {"the reference": reference and reference.path}
    paths["the critic's model"] = getattr(getattr(options, "algorithm", None), "critic_path", None)
    return {what: path for what, path in paths.items() if path is not None}


def code_marks(*values: Any) -> dict[str, str]:
    """A fingerprint of each code file from outside Lemma that these options use."""
    code: dict[str, list[Path]] = {}
    for file in outside_files(*values):
        code.setdefault(file.name, []).append(file)
    return {f"the code in {name}": mark_of(files) for name, files in code.items()}


def _weights(place: str) -> list[Path]:
    """The files that determine a model's output, those of an adapter's base included; none for a hub model that was
    never fetched."""
    folder = Path(place)
    base = base_of_adapter(place)
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        folder = cached_folder(place) or folder
    own = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    return own if base is None else [*own, *_weights(resolve(base))]


def cached_folder(name: str) -> Path | None:
    """Where the hub's client keeps a model on this machine."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def mark_of(files: list[Path]) -> str:
    """A fingerprint of the content of some files. In the hub's cache, a file's name already identifies its content."""
    whole = hashlib.sha256()
    for path in sorted(files, key=lambda file: file.name):
        said: Any = path.resolve().name if path.is_symlink() and path.resolve().parent.name == "blobs" else None
        whole.update(f"{path.name}\0{said or fingerprint(path)['sha256']}\0".encode())
    return whole.hexdigest()
