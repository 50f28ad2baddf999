"""The base of everything that a recipe can say. Each component declares its options next to its code."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Options(BaseModel):
    """Typed options: unknown keys are errors, values are fixed once read, and the text under a field is its help
    (`config/meanings`). A class is compiled when it is first used: a recipe uses few of those that are declared."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`lr: true` is a slip and not the number 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _leaves(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and not kinds & {bool, Any}:
                raise PydanticCustomError("bool_for_number", "a number is wanted here")
        return value


def _leaves(annotation: Any) -> set[Any]:
    """The plain types that an annotation is made of."""
    arguments = get_args(annotation)
    return {leaf for part in arguments for leaf in _leaves(part)} if arguments else {annotation}
