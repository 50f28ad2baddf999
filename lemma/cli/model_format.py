"""Which format a model speaks, as far as its folder tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def format_of_model(model: str, tokenizer: Any) -> dict[str, Any] | None:
    """The format of the run that a model is or lies in, else the one whose chat template its tokenizer has."""
    from lemma.formats import FORMATS, make_format
    from lemma.recipe import load_recipe

    place = Path(model).absolute()
    for folder in (place, *place.parents):
        if (folder / "recipe.yaml").is_file() and (folder / "stages").is_dir():
            return load_recipe(folder / "recipe.yaml").format.model_dump(mode="json")
    template = getattr(tokenizer, "chat_template", None)
    saved = [name for name in FORMATS if template and make_format(name).chat_template == template]
    return {"name": saved[0]} if saved else None
