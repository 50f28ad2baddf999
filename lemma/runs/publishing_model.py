"""Publishing an exported model: converting its precision, and uploading it to the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lemma.core.errors import UserError
from lemma.core.files import from_json, use_umask, write_whole
from lemma.runs.model_card import write_cards
from lemma.runs.run import RecipeLike
from lemma.runs.run_folder import LAYOUT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(folder: Path) -> str | None:
    """The precision of the weights according to a model's configuration."""
    try:
        config = from_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _named(str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch."))


def _named(dtype: str | None) -> str | None:
    """How recipes call torch's name of a precision."""
    return next((name for name, one in DTYPES.items() if str(one) == f"torch.{dtype}"), None)


def convert(folder: Path, precision: str) -> None:
    """Convert the weights of a model to another precision, file by file, and update its configuration."""
    dtype = DTYPES[precision]
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata()
        tensors = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
        if not all(torch.isfinite(one).all() for one in tensors.values() if one.is_floating_point()):
            raise UserError(f"weights of this model are too large for {precision}", fix="write --dtype bf16 or fp32")
        partial = path.with_name(f".{path.name}.partial")
        save_file(tensors, partial, metadata)
        use_umask(folder, partial.name)
        os.replace(partial, path)
    config = folder / "config.json"
    if config.is_file():
        values = from_json(config.read_text(encoding="utf-8"))
        values.pop("torch_dtype", None)
        write_whole(config, json.dumps(values | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")


def finish_export(
    folder: Path,
    recipe: RecipeLike,
    run: Path,
    stage: str,
    step: int,
    precision: str | None,
    contamination: Mapping[str, Any] | None = None,
) -> None:
    """Apply the requested precision, or that of the run, and write the card."""
    wanted = precision or recipe.model.precision or _trained_in(run, stage)
    if wanted is not None and wanted != precision_of(folder):
        convert(folder, wanted)
    write_cards(folder, recipe.model_dump(mode="json"), stage, run, step, contamination)


def _trained_in(run: Path, stage: str) -> str | None:
    """The precision that the stage computed in, which is that of its device."""
    folder = run / "stages" / stage
    try:
        wanted = from_json((folder / LAYOUT).read_text(encoding="utf-8")).get("precision")
    except (OSError, ValueError):
        wanted = None
    return _named(wanted) or precision_of(folder / "final" / "merged") or precision_of(folder / "final")


def push(folder: Path, name: str, *, public: bool = False) -> str:
    """Upload a model folder, with its card, to the hub; returns its URL. A new repository is private."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        made = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Exported by Lemma")
    except HFValidationError as error:
        raise UserError(f"'{name}' is not a hub name", fix="write it as user/model") from error
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the hub does not take {name} ({reason})", fix="log in with `hf auth login`, with a token that may write"
        ) from error
    except (OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"the hub cannot be reached ({error})", fix=f"try again; the model is in {folder}") from error
    return str(made.repo_id)
