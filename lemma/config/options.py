"""The base of everything that a recipe can say. Each component declares its options beside its code."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Typed options: unknown keys are errors, values are fixed once read, and the text under a field is its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
