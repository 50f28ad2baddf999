r"""Evaluation prompts of published models, under the names that LUFFY's evaluation gives them.

All but `prime_code` look for the answer in the last \boxed{}. If a completion opens or closes `<think>`, only what
follows the reasoning counts; reasoning that never ends has no answer, unless `grade_unfinished` is set. All but `own`
drop a problem's own system message, as LUFFY's evaluation does.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from lemma.formats.boxed import INSTRUCTION, BoxedChat, parse_perhaps_thinking
from lemma.formats.boxes import compose_boxed
from lemma.formats.format import Format
from lemma.formats.question_only import QuestionOnly
from lemma.formats.r1_zero import PREAMBLE
from lemma.formats.tags import GradeUnfinished, Parsed
from lemma.formats.templates import chatml, opening_lines, quote, with_suffix, without_system

BOX = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
CODE = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."


class Own(BoxedChat):
    r"""LUFFY's name for `chat`: the tokenizer's chat template, then `reasoning ... \boxed{answer}`."""

    name: Literal["own"] = "own"
    """Another name for `chat`."""


class _Boxed(Format):
    r"""Common base of the formats with their own prompts: `reasoning ... \boxed{answer}`, perhaps with think tags."""

    grade_unfinished: GradeUnfinished = False

    takes_system: ClassVar[bool] = False

    def compose(self, reasoning: str, answer: str) -> str:
        return compose_boxed(reasoning, answer)

    def parse(self, completion: str) -> Parsed:
        return parse_perhaps_thinking(completion, grade_unfinished=self.grade_unfinished)


class Qwen(_Boxed):
    r"""<|im_start|> turns under an instruction to reason step by step, then `reasoning ... \boxed{answer}`."""

    name: Literal["qwen"] = "qwen"
    """Qwen's prompt for mathematics."""

    @property
    def default_system(self) -> str:
        return INSTRUCTION

    @property
    def chat_template(self) -> str:
        return without_system(chatml(self.own_system, self.bos))


class SimpleRl(_Boxed):
    r"""<|im_start|> turns with a helpful assistant as the system message; the instruction follows the question;
    `\boxed{answer}`."""

    name: Literal["simplerl"] = "simplerl"
    """The prompt of SimpleRL-Zoo."""

    @property
    def default_system(self) -> str:
        return "You are a helpful assistant."

    @property
    def chat_template(self) -> str:
        return without_system(with_suffix(chatml(self.own_system, self.bos), f"\n{INSTRUCTION}"))


class PrimeSft(BoxedChat):
    r"""The tokenizer's own chat template; the request for a LaTeX answer follows the question; `\boxed{answer}`."""

    name: Literal["prime_sft"] = "prime_sft"
    """The prompt of PRIME's supervised model."""

    suffix: ClassVar[str] = BOX
    takes_system: ClassVar[bool] = False


def _one_line(preamble: str, bos: bool | None, suffix: str) -> str:
    """`preamble User: question suffix. Assistant:` on one line, if the question is."""
    return without_system(
        opening_lines(preamble, bos)
        + r"""{%- if system %}{{- system + ' ' }}{%- endif %}
{%- for turn in turns %}
{%- if turn['role'] == 'user' %}{{- 'User: ' + turn['content'] + """
        + quote(suffix)
        + r""" + '. Assistant:' }}
{%- else %}{{- turn['content'] + (eos_token or '') + '\n' }}{%- endif %}
{%- endfor %}"""
    )


class Prime(_Boxed):
    r"""One line that describes think and answer tags, `User: ... Assistant:`; `\boxed{answer}` at the end."""

    name: Literal["prime"] = "prime"
    """The prompt of PRIME."""

    @property
    def default_system(self) -> str:
        return PREAMBLE

    @property
    def chat_template(self) -> str:
        return _one_line(self.own_system, self.bos, BOX)

    def compose(self, reasoning: str, answer: str) -> str:
        return f" <think> {reasoning} </think> <answer> {compose_boxed('', answer)} </answer>"


_BLOCK = re.compile(r"```python[ \t]*\r?\n")


class PrimeCode(Format):
    """Like `prime`, for tasks whose answer is a program: the last Python block is the answer."""

    name: Literal["prime_code"] = "prime_code"
    """The prompt of PRIME for programs."""

    takes_system: ClassVar[bool] = False

    @property
    def default_system(self) -> str:
        return PREAMBLE

    @property
    def chat_template(self) -> str:
        return _one_line(self.own_system, self.bos, CODE)

    def compose(self, reasoning: str, answer: str) -> str:
        block = f"```python\n{answer}\n```"
        return f" {reasoning}\n\n{block}" if reasoning else f"\n{block}"

    def parse(self, completion: str) -> Parsed:
        starts = list(_BLOCK.finditer(completion))
        if not starts:
            return Parsed(completion.strip(), None, ("no_answer",))
        reasoning = completion[: starts[-1].start()].strip()
        code, closed, after = completion[starts[-1].end() :].partition("\n```")
        if not closed:
            return Parsed(reasoning, None, ("no_closing_tag",))
        faults = ["several_answers"] if len(starts) > 1 else []
        if not code.strip():
            return Parsed(reasoning, None, (*faults, "no_answer"))
        if after.strip():
            faults.append("text_after_answer")
        return Parsed(reasoning, code.strip(), tuple(faults))


class No(QuestionOnly):
    r"""The question and nothing else, like `question_only`; an answer inside `<think>` tags does not count."""

    name: Literal["no"] = "no"  # type: ignore[assignment]
    """No prompt around the question."""
    grade_unfinished: GradeUnfinished = False

    def parse(self, completion: str) -> Parsed:
        return parse_perhaps_thinking(completion, grade_unfinished=self.grade_unfinished)
