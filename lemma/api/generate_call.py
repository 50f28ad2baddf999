"""`lemma.generate`: questions to a model in, its words and the answers in them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.api.evaluate_call import Device, EngineName, open_model
from lemma.core.errors import UserError
from lemma.core.events import Sink, silent
from lemma.core.types import Message, Problem

if TYPE_CHECKING:
    import numpy as np

    from lemma.engines.protocol import Completion, Request
    from lemma.formats import Format
    from lemma.models.policy import Policy

Question = str | Problem | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """One completion. `answer` is what the format found in it, None where none counts; `faults` say why.

    `finish` is `stop` where the model ended by itself and `length` where it was cut off.
    """

    question: str
    sample: int
    text: str
    answer: str | None
    format: str
    faults: tuple[str, ...]
    finish: str
    tokens: int
    logprob: float
    ids: np.ndarray
    logprobs: np.ndarray


def generate(
    model: str | Path,
    questions: Question | Sequence[Question],
    *,
    samples: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_tokens: int = 1024,
    format: str | Mapping[str, Any] | None = None,
    system: str | None = None,
    seed: int = 0,
    device: Device = "auto",
    engine: EngineName = "native",
    sink: Sink = silent,
) -> list[Answer]:
    """Ask a model; the answers in the order of the questions, all samples of one together.

    A question is text, a list of messages with role and content, or a `Problem`. The format is the one named here, the
    model's own, or `boxed` or `r1_zero`. The temperature is 0 for one sample and 1 for several, if not given.
    """
    heat = (0.0 if samples == 1 else 1.0) if temperature is None else temperature
    _check(samples, heat, top_p, max_tokens)
    problems = [_problem(one) for one in _several(questions)]
    from lemma.api.model_format import format_to_ask_in
    from lemma.engines.stop_strings import ends_of

    policy, speaker = open_model(str(model), device, engine, seed, sink)
    try:
        fmt, _ = format_to_ask_in(str(model), policy.tokenizer, format, system)
        for number, problem in enumerate(problems):
            speaker.submit(_request(number, problem, policy, fmt, heat, top_p, max_tokens, samples))
        completions = sorted(speaker.completions(), key=lambda one: (one.key, one.sample))
        ends = ends_of(policy)
        return [answer_of(one, problems[int(one.key[1])], fmt, ends, policy.tokenizer) for one in completions]
    finally:
        speaker.close()


def answer_of(completion: Completion, problem: Problem, fmt: Format, ends: frozenset[int], tokenizer: Any) -> Answer:
    """A completion in words."""
    from lemma.engines.stop_strings import text_of

    text = text_of(completion, ends, fmt.stop, tokenizer)
    parsed = fmt.parse(text)
    return Answer(
        problem.question,
        completion.sample,
        text,
        parsed.answer,
        fmt.name,
        parsed.faults,
        completion.finish,
        len(completion.ids),
        float(completion.logprobs.sum()),
        completion.ids,
        completion.logprobs,
    )


def _request(
    number: int,
    problem: Problem,
    policy: Policy,
    fmt: Format,
    temperature: float,
    top_p: float,
    max_tokens: int,
    samples: int,
) -> Request:
    from lemma.engines.protocol import Request, Sampling
    from lemma.engines.stop_strings import ends_of
    from lemma.formats.encode import encode_prompt, warn_of_unknown_words

    warn_of_unknown_words(problem, policy.tokenizer)
    prompt_T = encode_prompt(fmt, problem, policy.tokenizer)
    room = policy.context - len(prompt_T)
    if room <= 0:
        raise UserError(f"the prompt has {len(prompt_T)} tokens but the model takes {policy.context}", fix="ask less")
    sampling = Sampling(
        max_tokens=min(max_tokens, room),
        temperature=temperature,
        top_p=top_p,
        stop=fmt.stop,
        stop_ids=tuple(sorted(ends_of(policy))),
    )
    return Request(("generate", number), prompt_T, sampling, samples)


def _several(questions: Question | Sequence[Question]) -> list[Question]:
    is_one = isinstance(questions, str | Problem) or all(isinstance(part, Mapping) for part in questions)
    return [questions] if is_one else list(questions)  # type: ignore[list-item, arg-type]


def _problem(question: Question) -> Problem:
    if isinstance(question, Problem):
        return question
    if isinstance(question, str):
        if not question.strip():
            raise UserError("a question is empty", fix='write for example "What is 6 times 7?"')
        return Problem((Message("user", question.strip()),))
    return Problem(tuple(Message(str(one["role"]), str(one["content"])) for one in question))


def _check(samples: int, temperature: float, top_p: float, max_tokens: int) -> None:
    for name, value, least in (("samples", samples, 1), ("max_tokens", max_tokens, 1), ("temperature", temperature, 0)):
        if not value >= least:
            raise UserError(f"{name} is {value}", fix=f"write {least} or more")
    if samples > 1 and temperature == 0:
        raise UserError("samples at temperature 0 are all the same", fix="raise temperature, or write samples=1")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}", fix="write a number above 0 and up to 1")
