"""Plain text with think and answer tags, for base models: the prompt ends inside the thinking."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import field_validator, model_validator

from lemma.formats.format import Format
from lemma.formats.tags import GradeUnfinished, Parsed, Tags, parse_tagged, unboxed
from lemma.formats.templates import opening_lines

PREAMBLE = (
    "This is a conversation between User and Assistant. The User asks a question and the Assistant solves it: first it "
    "thinks the problem through step by step, and then it gives the answer. The thinking is enclosed in "
    "<think> </think> and the answer in <answer> </answer>, that is, <think> the thinking goes here </think> "
    "<answer> the answer goes here </answer>."
)
TAGS = Tags("<think>", "</think>", "<answer>", "</answer>", opened=True)
ASKED = "\nUser: {question}\nAssistant: <think>"
"""How the published prompt goes on after its instruction."""
TURNS = r"""{%- for turn in turns %}
{%- if turn['role'] == 'user' %}{{- 'User: ' + turn['content'] + '\nAssistant: ' }}
{%- else %}{{- turn['content'] + (eos_token or '') + '\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<think>' }}{%- endif %}"""


class R1Zero(Format):
    """`User: ... Assistant: <think>`, then ` reasoning </think> <answer> answer </answer>`."""

    name: Literal["r1_zero"] = "r1_zero"
    """Reasoning and answer in tags; the prompt already opens `<think>`."""
    preamble: bool = True
    """Begin with a line that describes the tags. Without it a prompt is just the question, for tiny models."""
    strict_space: bool = False
    """Compatibility: a completion follows the format only with exactly one space between `</think>` and `<answer>`."""
    grade_unfinished: GradeUnfinished = False

    stop: ClassVar[tuple[str, ...]] = ("</answer>",)

    @field_validator("system")
    @classmethod
    def _of_whole_prompt(cls, text: str | None) -> str | None:
        """The published prompt, as its file has it, stands for its instruction."""
        if text is None or "{question}" not in text:
            return text
        instruction, mark, after = text.partition(ASKED)
        if not mark or after.strip():
            raise ValueError(f"a prompt with a {{question}} ends in {ASKED!r}; write the instruction alone")
        return instruction

    @model_validator(mode="after")
    def _one_preamble(self) -> R1Zero:
        if self.system and not self.preamble:
            raise ValueError("`system` is the text of the preamble; remove it or `preamble: false`")
        return self

    @property
    def default_system(self) -> str:
        return PREAMBLE if self.preamble else ""

    @property
    def opening(self) -> str:
        return TAGS.think_start

    @property
    def chat_template(self) -> str:
        preamble = r"{%- if system %}{{- system + '\n' }}{%- endif %}" + "\n" if self.preamble else ""
        return opening_lines(self.own_system, self.bos) + preamble + TURNS

    def compose(self, reasoning: str, answer: str) -> str:
        return f" {reasoning} </think> <answer> {answer} </answer>"

    def parse(self, completion: str) -> Parsed:
        parsed = parse_tagged(completion, TAGS, grade_unfinished=self.grade_unfinished)
        faults = list(parsed.faults)
        answer = None if parsed.answer is None else unboxed(parsed.answer)
        if parsed.answer is not None and not answer:
            faults.append("no_answer")
        if self.strict_space and "missing_think_end" not in faults and "</think> <answer>" not in completion:
            faults.append("wrong_space")
        return replace(parsed, answer=answer or None, faults=tuple(faults))
