"""Calls to math-verify as other systems make them. They belong in a worker, which has the limits of time and memory.

Arithmetic that is too large is given to the parser as a command that it does not know: math-verify gives plain
arithmetic to sympy's reader, which evaluates Python; only digits and operators of a bounded size get there. Where the
original pins a parser (antlr 4.11) that cannot read `50\\%`, so is `\\%`.
"""

from __future__ import annotations

from typing import Any

from lemma.grading.guard import without_large_arithmetic
from lemma.grading.limits import GoldLimit

_UNREADABLE = " \\unreadable "


def verified(gold: str, answer: str, boxed_first: bool = False) -> bool:
    """parse and verify with these texts, gold first; with `boxed_first` as the boxed graders do, without percent."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    options: dict[str, Any] = {"parsing_timeout": None}
    if boxed_first:
        options["extraction_config"] = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
        options["fallback_mode"] = "no_fallback"
        gold, answer = _without_percent(gold), _without_percent(answer)
    if without_large_arithmetic(gold, _UNREADABLE) != gold:
        raise GoldLimit("arithmetic")
    answer = without_large_arithmetic(answer, _UNREADABLE)
    return bool(verify(parse(gold, **options), parse(answer, **options), timeout_seconds=None))


def _without_percent(text: str) -> str:
    return text.replace("\\%", "\\unreadablepercent ")
