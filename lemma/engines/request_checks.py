"""What every engine refuses: a request that cannot be generated."""

from __future__ import annotations

from collections.abc import Sequence

from lemma.engines.protocol import EngineError, Request, Sampling


def check_request(request: Request, context: int) -> None:
    """Raise EngineError for a request that cannot be generated."""
    length = len(request.prompt)
    wrong = _wrong_settings(request.sampling)
    if length == 0:
        wrong = "its prompt is empty"
    elif length >= context:
        wrong = f"its prompt of {length} tokens fills the context of {context}"
    elif request.n < 1:
        wrong = "n is below 1"
    if wrong:
        raise EngineError(f"request {request.name} cannot be generated: {wrong}")


def _wrong_settings(sampling: Sampling) -> str | None:
    """The first thing that is wrong, if any."""
    problems: Sequence[tuple[bool, str]] = (
        (sampling.max_tokens < 1, "max_tokens is below 1"),
        (sampling.temperature < 0, "temperature is below 0"),
        (not 0 < sampling.top_p <= 1, "top_p is not within 0 and 1"),
        (sampling.top_k < 0, "top_k is below 0"),
        (not 0 <= sampling.min_p <= 1, "min_p is not within 0 and 1"),
        (sampling.min_tokens > sampling.max_tokens, "min_tokens is above max_tokens"),
        (sampling.repetition_penalty <= 0, "repetition_penalty is not above 0"),
    )
    return next((text for is_wrong, text in problems if is_wrong), None)
