"""How problems become prompts and completions become answers: one file per format, and the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lemma.config.registry import Registry, from_options
from lemma.core.errors import UserError, nearest
from lemma.formats.alpaca import Alpaca
from lemma.formats.boxed import Boxed, Chat
from lemma.formats.format import Format
from lemma.formats.published import No, Own, Prime, PrimeCode, PrimeSft, Qwen, SimpleRl
from lemma.formats.question_only import QuestionOnly
from lemma.formats.r1_zero import R1Zero
from lemma.formats.tags import FAULTS, HARMLESS, Parsed, read_answer
from lemma.formats.think_answer import ThinkAnswer
from lemma.formats.think_boxed import ThinkBoxed
from lemma.formats.working_out import WorkingOut
from lemma.formats.xml import Xml

FORMATS: Registry[type[Format]] = Registry(
    "formats",
    Format,
    {
        "r1_zero": R1Zero,
        "question_only": QuestionOnly,
        "xml": Xml,
        "working_out": WorkingOut,
        "boxed": Boxed,
        "think_boxed": ThinkBoxed,
        "think_answer": ThinkAnswer,
        "alpaca": Alpaca,
        "chat": Chat,
        "own": Own,
        "qwen": Qwen,
        "simplerl": SimpleRl,
        "prime": Prime,
        "prime_sft": PrimeSft,
        "prime_code": PrimeCode,
        "no": No,
    },
)

__all__ = ["FAULTS", "FORMATS", "HARMLESS", "Format", "Parsed", "make_format", "read_answer"]


def make_format(spec: str | Mapping[str, Any] | Format) -> Format:
    """A format from its name, from `path.py:Name`, or from its name and options as a recipe writes them."""
    if isinstance(spec, Format):
        return spec
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    if "name" not in options:
        raise UserError(
            "the format has no name", fix="write one of: " + ", ".join(f"`name: {name}`" for name in FORMATS)
        )
    name = str(options["name"])
    kind = FORMATS.find(name)
    if kind is None:
        raise UserError(f"there is no format '{name}'", fix=nearest(name, FORMATS.names()))
    return from_options(kind, options, f"format {name}")
