"""Instruction and response under headings, as in classic instruction tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lemma.formats.format import Format
from lemma.formats.tags import Parsed
from lemma.formats.templates import opening_lines

SYSTEM = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
TURNS = r"""{%- if system %}{{- system + '\n\n' }}{%- endif %}
{%- for turn in turns %}
{%- if turn['role'] == 'user' %}{{- '### Instruction:\n' + turn['content'] + '\n\n### Response:\n' }}
{%- else %}{{- turn['content'] + (eos_token or '') + '\n\n' }}{%- endif %}
{%- endfor %}"""


class Alpaca(Format):
    """`### Instruction:` and `### Response:`, then free text; the answer is what follows the last `The answer is:`."""

    name: Literal["alpaca"] = "alpaca"
    """Alpaca's prompt."""
    marker: str = Field("The answer is:", min_length=1)
    """Text that introduces the answer: the answer is what follows its last occurrence, up to the end of the line."""

    @property
    def default_system(self) -> str:
        return SYSTEM

    @property
    def chat_template(self) -> str:
        return opening_lines(self.own_system, self.bos) + TURNS

    def compose(self, reasoning: str, answer: str) -> str:
        line = f"{self.marker} {' '.join(answer.splitlines())}"
        return f"{reasoning}\n\n{line}" if reasoning else line

    def parse(self, completion: str) -> Parsed:
        reasoning, marker, tail = completion.rpartition(self.marker)
        if not marker:
            return Parsed(completion.strip(), None, ("no_answer",))
        faults = ["several_answers"] if self.marker in reasoning else []
        answer, *after = tail.splitlines() or [""]
        if not answer.strip():
            return Parsed(reasoning.strip(), None, (*faults, "no_answer"))
        if any(line.strip() for line in after):
            faults.append("text_after_answer")
        return Parsed(reasoning.strip(), answer.strip(), tuple(faults))
