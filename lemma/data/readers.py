"""How rows become problems, demonstrations, preference pairs and judged responses.

A reader is a small function from one row to the richest item that the row can give. `READERS` lists them all; `auto`
takes the first one, from top to bottom, that `fits` the columns of the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from lemma.core.errors import UserError, nearest
from lemma.core.types import Demonstration, Judged, Message, Preference, Problem
from lemma.data import conversations, pairs
from lemma.data.choices import gpqa, hellaswag, multiple_choice, options_of
from lemma.data.columns import NO_COLUMNS, advice, check_columns, renamed, repair, theirs
from lemma.data.rows import (
    JsonError,
    LeftOut,
    Row,
    RowError,
    Values,
    boxed,
    golds,
    has,
    last_said,
    level_of,
    listed,
    messages,
    optional_text,
    parsed,
    probabilities,
    table,
    text,
)

Item = Problem | Demonstration | Preference | Judged

LUFFY_PROBS = "target_ds_qwen_7b_probs"


class Reader(NamedTuple):
    """A row format: the function that reads it, the columns that a row of it has, null or not, where `a|b` means
    either, and a description; `also` is what else a row must be like."""

    read: Callable[[Values], Item]
    columns: tuple[str, ...]
    help: str
    also: Callable[[Values], bool] | None = None

    def fits(self, values: Values) -> bool:
        has_all = all(any(one in values for one in either.split("|")) for either in self.columns)
        return has_all and (self.also is None or self.also(values))


def _user(question: str) -> tuple[Message, ...]:
    return (Message("user", question),)


def gsm8k(values: Values) -> Demonstration:
    """`question`, and `answer` with the working before `#### N`."""
    working, mark, number = text(values, "answer").rpartition("####")
    answer = _plain_number(number)
    if not mark or not answer:
        raise RowError("the column 'answer' has no final answer after '####'")
    problem = Problem(_user(text(values, "question")), (answer,))
    return Demonstration(problem, reasoning=working.strip(), answer=answer)


def _plain_number(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "")


def question_answer(values: Values) -> Problem | Demonstration:
    """`question` and a bare `answer`, optionally with `reasoning`; a row that looks like GSM8K's is read as one."""
    if READERS["gsm8k"].fits(values):
        return gsm8k(values)
    problem = Problem(
        _user(text(values, "question")),
        golds(values, "answer"),
        id=optional_text(values, "id") or "",
        subject=optional_text(values, "subject", "category"),
        level=level_of(values),
    )
    reasoning = optional_text(values, "reasoning", "rationale")
    return problem if reasoning is None else Demonstration(problem, reasoning=reasoning, answer=problem.golds[0])


def math(values: Values) -> Problem | Demonstration:
    r"""`problem` with an `answer`, or a `solution` that contains it in \boxed{}."""
    solution = optional_text(values, "solution")
    in_box = boxed(solution) if solution else None
    if has(values, "answer"):
        right = golds(values, "answer")
    elif in_box is not None:
        right = (in_box,)
    elif solution is not None:
        right = ()
    else:
        raise RowError("neither 'answer' nor 'solution' holds an answer")
    problem = Problem(
        _user(text(values, "problem", "question")),
        right,
        id=optional_text(values, "unique_id", "id") or "",
        subject=optional_text(values, "subject", "type"),
        level=level_of(values),
    )
    if solution is None or solution.strip() in right:
        return problem
    if not right:
        return Demonstration(problem, response=solution)
    return Demonstration(problem, reasoning=solution, answer=right[0])


def instruction(values: Values) -> Demonstration:
    """`instruction` (with an optional `input`) or `prompt`, which the format wraps, and `output` or `response`."""
    asked = text(values, "instruction", "prompt")
    more = optional_text(values, "input")
    problem = Problem(_user(f"{asked}\n\n{more}" if more else asked))
    return Demonstration(problem, response=text(values, "output", "response"))


def trace(values: Values) -> Demonstration:
    """`problem`, `generated_solution` and `expected_answer`."""
    answer = golds(values, "expected_answer")
    problem = Problem(_user(text(values, "problem", "question")), answer)
    return Demonstration(problem, reasoning=text(values, "generated_solution"), answer=answer[0])


def prompt_answer(values: Values) -> Problem:
    """`prompt` (text or messages) and its `answer`, `solution` or `ground_truth`, which is the bare answer."""
    return Problem(messages(values, "prompt"), golds(values, "answer", "solution", "ground_truth"))


def luffy(values: Values) -> Problem | Demonstration:
    """`prompt` messages, `reward_model.ground_truth`, and a `target` message of a teacher, or none.

    The teacher's probability of each token of the target, if the data has it, becomes `trace_probs`.
    """
    reward, info = table(values, "reward_model"), values.get("extra_info") or {}
    target = last_said(messages(values, "target"), "target") if values.get("target") else None
    probs = probabilities(values, "trace_probs", LUFFY_PROBS)
    problem = Problem(
        messages(values, "prompt"),
        golds(reward, "ground_truth"),
        source=optional_text(values, "data_source") or "",
        traces=(target,) if target else (),
        extra={"ability": values.get("ability"), "extra_info": info} | ({"trace_probs": probs} if probs else {}),
    )
    return Demonstration(problem, response=target) if target else problem


def luffy_sft(values: Values) -> Demonstration:
    """`prompt` messages and `target` messages, as OpenRLHF takes them."""
    return Demonstration(Problem(messages(values, "prompt")), response=last_said(messages(values, "target"), "target"))


def rlvr(values: Values) -> Problem:
    """`messages`, `ground_truth`, and in `dataset` the name of the verifier."""
    said = messages(values, "messages")
    asked = said[:-1] if said[-1].role == "assistant" else said
    if not asked:
        raise RowError("the column 'messages' asks nothing")
    return Problem(asked, golds(values, "ground_truth"), source=text(values, "dataset").lower())


def olympiadbench(values: Values) -> Problem:
    """OlympiadBench's own columns; several answers are one list, and the row's tolerance stays in `extra`."""
    context = optional_text(values, "context")
    question = text(values, "question")
    own = {name: values.get(name) for name in ("is_multiple_answer", "unit", "answer_type", "error")}
    return Problem(
        _user(f"{context}\n\n{question}" if context else question),
        (", ".join(golds(values, "final_answer")),),
        id=optional_text(values, "id") or "",
        subject=optional_text(values, "subfield"),
        extra={"original": own},
    )


SCHEMA = {
    *("id", "dataset", "split", "problem", "answer", "golds", "solution", "subject", "level", "choices", "labels"),
    *("messages", "prompt", "response", "reasoning", "target", "expected_answer", "generated_solution", "extra"),
    *("turns_from", "calls"),
}


def lemma(values: Values) -> Problem | Demonstration:
    """Lemma's own schema: `dataset`, `problem`, `answer` and optional columns; unknown columns are kept in `extra`."""
    choices: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    if has(values, "choices"):
        choices, letter = options_of(values)
        right = (letter,)
    elif has_any(values, "golds", "answer"):
        right = golds(values, "golds", "answer")
    more = {name: value for name, value in values.items() if name not in SCHEMA and value is not None}
    more |= _extra(values)
    probs = probabilities(more, "trace_probs")
    problem = Problem(
        messages(values, "messages", "problem"),
        right,
        id=optional_text(values, "id") or "",
        source=text(values, "dataset"),
        subject=optional_text(values, "subject"),
        level=level_of(values),
        choices=choices,
        traces=_traces(values),
        extra=more | ({"trace_probs": probs} if probs else {}),
    )
    if has(values, "response"):
        return conversations.of_schema(problem, values)
    stated = optional_text(values, "expected_answer")
    reasoning = _reasoning(values, right if stated is None else (*right, stated))
    if reasoning is None:
        return problem
    answer = stated or (right[0] if right else None)
    return Demonstration(problem, reasoning=reasoning, answer=answer)


def _extra(values: Values) -> Values:
    """The column `extra`: JSON text, because a table has one type per column."""
    if not values.get("extra"):
        return {}
    try:
        extra = parsed(text(values, "extra"))
    except JsonError as error:
        raise RowError(f"the column 'extra' is not JSON text: {error}") from error
    return table({"extra": extra}, "extra")


def _traces(values: Values) -> tuple[str, ...]:
    """A teacher's texts: one, several, or messages that end with the teacher's."""
    target = values.get("target")
    if not target:
        return ()
    if isinstance(target, str):
        return (target,)
    traces = listed(values, "target")
    return (
        tuple(traces)
        if all(isinstance(one, str) for one in traces)
        else (last_said(messages(values, "target"), "target"),)
    )


def _reasoning(values: Values, answers: tuple[str, ...]) -> str | None:
    """The working of a row in Lemma's schema; GSM8K's repeats the answer in a last line `#### N`, which is removed.

    Markdown headings look the same, so such a line stays unless it is the answer. The column `reasoning` is kept whole.
    """
    reasoning = (optional_text(values, "generated_solution", "reasoning", "solution") or "").rstrip()
    if reasoning and not optional_text(values, "generated_solution") and optional_text(values, "reasoning"):
        return reasoning.strip()
    working, mark, last = reasoning.rpartition("\n####")
    if mark and any(_same_number(last, answer) for answer in answers):
        reasoning = working
    return reasoning.strip() or None


def _same_number(one: str, other: str) -> bool:
    """Whether two spellings are equal, as text or as numbers, ignoring commas."""
    one, other = _plain_number(one), _plain_number(other)
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def has_any(values: Values, *names: str) -> bool:
    return any(has(values, name) for name in names)


READERS: dict[str, Reader] = {
    "lemma": Reader(lemma, ("id", "dataset", "problem", "answer"), "Lemma's own schema"),
    "luffy": Reader(luffy, ("prompt", "reward_model"), "prompt, target, reward_model, extra_info (verl, LUFFY)"),
    "rlvr": Reader(rlvr, ("messages", "ground_truth", "dataset"), "messages, ground_truth, dataset"),
    "preference": Reader(pairs.preference, ("chosen", "rejected"), "chosen, rejected, and mostly prompt"),
    "judged": Reader(pairs.judged, ("prompt", "completion", "label"), "prompt, completion, label (KTO)"),
    "multiple_choice": Reader(
        multiple_choice,
        ("question|problem", "choices|options|A", "answer|answerKey|answer_index"),
        "question, choices, answer by letter, label or index",
    ),
    "hellaswag": Reader(hellaswag, ("ctx_a", "ctx_b", "endings"), "ctx_a, ctx_b, endings, label"),
    "gpqa": Reader(gpqa, ("Question", "Correct Answer"), "Question, Correct Answer, Incorrect Answer 1 to 3"),
    "olympiadbench": Reader(
        olympiadbench, ("question", "final_answer"), "question, context, final_answer, error (a tolerance)"
    ),
    "trace": Reader(
        trace, ("problem|question", "generated_solution", "expected_answer"), "problem and a generated solution"
    ),
    "prompt_response": Reader(
        conversations.prompt_response, ("prompt|question", "response"), "prompt (text or messages) and response"
    ),
    "prompt_completion": Reader(
        conversations.prompt_completion, ("prompt", "completion"), "prompt and completion, text or messages"
    ),
    "luffy_sft": Reader(
        luffy_sft,
        ("prompt", "target"),
        "prompt and target, both messages",
        lambda values: not isinstance(values["prompt"], str),
    ),
    "instruction": Reader(instruction, ("instruction", "output"), "instruction, input, output; prompt, response"),
    "math": Reader(math, ("problem", "answer|solution"), r"problem, solution with \boxed{} or answer, level"),
    "gsm8k": Reader(
        gsm8k,
        ("question", "answer"),
        "question, answer with #### N",
        lambda values: "####" in str(values["answer"]),
    ),
    "question_answer": Reader(question_answer, ("question", "answer"), "question and a bare answer"),
    "prompt_answer": Reader(prompt_answer, ("prompt", "answer|solution|ground_truth"), "prompt and a bare answer"),
    "chat": Reader(
        conversations.chat,
        ("messages|conversations|conversation",),
        "messages that end with the assistant's; tools",
    ),
    "prompt": Reader(conversations.prompt_alone, ("prompt",), "prompt alone, text or messages"),
    "text": Reader(conversations.whole_text, ("text",), "text, learnt as it is"),
}


def choose(name: str, row: Row) -> Reader:
    """The reader of that name, or, for `auto`, the first that fits the row."""
    if name != "auto":
        if name not in READERS:
            raise UserError(f"there is no reader '{name}'", fix=nearest(name, ["auto", *READERS]))
        return READERS[name]
    for reader in READERS.values():
        if reader.fits(row.values):
            return reader
    raise row.error("these columns do not say which is the question and which the answer", fix=advice(row.values))


def read_each(
    rows: Iterable[Row], name: str, say: Callable[[str], None], columns: Mapping[str, str] = NO_COLUMNS
) -> Iterator[tuple[Row, Item]]:
    """The items of all rows from one reader, each with its row; says how many were left out.

    `columns` maps the names that readers know to those in the file: {"question": "Query"}.
    """
    reader: Reader | None = None
    count = 0
    left_out: list[UserError] = []
    for row in rows:
        if reader is None:
            check_columns(row, columns)
            reader = choose(name, row._replace(values=renamed(row.values, columns)))
        try:
            item = reader.read(renamed(row.values, columns))
        except LeftOut as error:
            left_out.append(row.error(theirs(str(error), columns)))
            continue
        except RowError as error:
            sentence = theirs(str(error), columns)
            raise row.error(sentence, fix=repair(sentence)) from error
        count += 1
        yield row, item
    if left_out and not count:
        raise left_out[0]
    if left_out:
        say(f"{len(left_out)} of {len(left_out) + count} rows were left out, such as this one: {left_out[0]}")
