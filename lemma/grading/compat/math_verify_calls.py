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


def latex_accuracy(completion: str, solution: str) -> float | None:
    """The accuracy of the think/answer reward: LaTeX only, first match; None where the solution cannot be parsed."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    wanted = parse(
        solution, extraction_mode="first_match", extraction_config=[LatexExtractionConfig()], parsing_timeout=None
    )
    if not wanted:
        return None
    form = NormalizationConfig(nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True)
    given = parse(
        completion,
        extraction_config=[
            LatexExtractionConfig(normalization_config=form, boxed_match_priority=0, try_extract_without_anchor=True)
        ],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return float(verify(wanted, given, timeout_seconds=None))
