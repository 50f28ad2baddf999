"""`lemma.generate`: questions to a model in, its words and the answers in them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.api.evaluate_call import Device, EngineName, open_model
from lemma.api.model_of_run import format_to_ask_in
from lemma.core.errors import UserError
from lemma.core.events import Sink, silent
from lemma.core.ranks import gather_to_leader, own_slots, slots, together, world_size
from lemma.core.roll_call import check_alike
from lemma.core.types import Message, Problem, content_id
from lemma.engines.protocol import Completion, Engine, Request

if TYPE_CHECKING:
    import numpy as np

    from lemma.engines.engine_options import NativeOptions
    from lemma.engines.protocol import Completion, Engine, Request
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
    asker = Asker.open(str(model), device, engine, seed, sink, format, system)
    try:
        for problem in problems:
            asker.engine.submit(asker.request(problem, heat, top_p, max_tokens, samples))
        completions = sorted(asker.engine.completions(), key=lambda one: (one.key, one.sample))
        return [asker.answer(one, problems[int(one.key[1])]) for one in completions]
    finally:
        asker.engine.close()


@dataclass
class Asker:
    """A model with its engine and its format, which is expected to be kept only where somebody chose it."""

    policy: Policy
    engine: Engine
    format: Format
    is_format_chosen: bool
    asked: int = 0

    @classmethod
    def open(
        cls,
        model: str,
        device: Device,
        engine: EngineName,
        seed: int,
        sink: Sink,
        format: str | Mapping[str, Any] | None,
        system: str | None,
        options: NativeOptions | None = None,
    ) -> Asker:
        policy, opened = open_model(model, device, engine, seed, sink, options)
        try:
            return cls(policy, opened, *format_to_ask_in(model, policy.tokenizer, format, system))
        except BaseException:
            opened.close()
            raise

    @cached_property
    def ends(self) -> frozenset[int]:
        from lemma.engines.stop_strings import ends_of

        return ends_of(self.policy)

    def request(self, problem: Problem, temperature: float, top_p: float, max_tokens: int, samples: int) -> Request:
        from lemma.engines.protocol import Request, Sampling
        from lemma.formats.encode import encode_prompt, warn_of_unknown_words

        warn_of_unknown_words(problem, self.policy.tokenizer)
        prompt_T, context = encode_prompt(self.format, problem, self.policy.tokenizer), self.policy.context
        if len(prompt_T) >= context:
            raise UserError(f"the prompt has {len(prompt_T)} tokens but the model takes {context}", fix="ask less")
        sampling = Sampling(
            max_tokens=min(max_tokens, context - len(prompt_T)),
            temperature=temperature,
            top_p=top_p,
            stop=self.format.stop,
            stop_ids=tuple(sorted(self.ends)),
        )
        self.asked += 1
        return Request(("generate", self.asked - 1), prompt_T, sampling, samples)

    def text(self, completion: Completion) -> str:
        from lemma.engines.stop_strings import text_of

        return text_of(completion, self.ends, self.format.stop, self.policy.tokenizer)

    def answer(self, completion: Completion, problem: Problem) -> Answer:
        """A completion in words."""
        text = self.text(completion)
        parsed = self.format.parse(text)
        return Answer(
            problem.question,
            completion.sample,
            text,
            parsed.answer,
            self.format.name,
            parsed.faults,
            completion.finish,
            len(completion.ids),
            float(completion.logprobs.sum()),
            completion.ids,
            completion.logprobs,
        )

    def check_alike(self, requests: Sequence[Request]) -> None:
        """Refuse ranks that have read something else than the first one."""
        from lemma.models.same_weights import check_same_weights
        from lemma.runs.ingredients import code_marks

        if world_size() == 1:
            return
        check_same_weights(self.policy.module)
        marks = {"the questions, as prompts": content_id([request.prompt.tolist() for request in requests])}
        check_alike(marks | code_marks(self.format))


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


PLACE = "completions"


def sharded_completions(engine: Engine, requests: Sequence[Request]) -> Iterator[Completion]:
    """The completions of all requests, as each finishes. With several ranks the first one gets them once all are
    finished, and the others get none; the slot of a request depends on its index only."""
    if slots() == 1:
        yield from _completions(engine, requests)
        return
    mine: list[Completion] = []

    def own_part() -> None:
        for slot in own_slots():
            with engine.slot(slot):
                mine.extend(_completions(engine, requests[slot :: slots()]))

    together(own_part, PLACE)
    for part in gather_to_leader(mine, PLACE):
        yield from part


def _completions(engine: Engine, requests: Sequence[Request]) -> Iterator[Completion]:
    for request in requests:
        engine.submit(request)
    yield from engine.completions()
