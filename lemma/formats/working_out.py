"""Working out and solution between configurable tags, with a chat template that starts the working out."""

from __future__ import annotations

from itertools import permutations
from typing import Literal

from pydantic import Field, model_validator

from lemma.formats.format import Format
from lemma.formats.tags import GradeUnfinished, Parsed, Tags, parse_tagged
from lemma.formats.templates import opening_lines, quote

TURNS = r"""{%- if system %}{{- system + (eos_token or '') }}{%- endif %}
{%- for turn in turns %}
{{- turn['content'] }}{%- if turn['role'] == 'assistant' %}{{- eos_token or '' }}{%- endif %}
{%- endfor %}
"""


class WorkingOut(Format):
    """System text, end-of-sequence token, question, start tag; then the working out and, right after its end tag, the
    solution."""

    name: Literal["working_out"] = "working_out"
    """Working out and solution in tags."""
    start: str = Field("<start_working_out>", min_length=1)
    """Tag that opens the working out; the prompt ends in it."""
    end: str = Field("<end_working_out>", min_length=1)
    """Tag that closes the working out."""
    solution_start: str = Field("<SOLUTION>", min_length=1)
    """Tag that opens the solution."""
    solution_end: str = Field("</SOLUTION>", min_length=1)
    """Tag that closes the solution."""
    grade_unfinished: GradeUnfinished = False

    @model_validator(mode="after")
    def _tags_are_apart(self) -> WorkingOut:
        tags = [self.start, self.end, self.solution_start, self.solution_end]
        if any(not tag.strip() for tag in tags) or any(one in other for one, other in permutations(tags, 2)):
            raise ValueError("no tag may be blank, or be part of another; choose four different tags")
        return self

    @property
    def default_system(self) -> str:
        return (
            "You are given a problem.\n"
            "Think about it and write down your working out.\n"
            f"Place the working out between {self.start} and {self.end}.\n"
            f"Then give your solution between {self.solution_start}{self.solution_end}"
        )

    @property
    def opening(self) -> str:
        return self.start

    @property
    def chat_template(self) -> str:
        generation = "{%- if add_generation_prompt %}{{- " + quote(self.start) + " }}{%- endif %}"
        return opening_lines(self.own_system, self.bos) + TURNS + generation

    def compose(self, reasoning: str, answer: str) -> str:
        return f"{reasoning}{self.end}{self.solution_start}{answer}{self.solution_end}"

    def parse(self, completion: str) -> Parsed:
        tags = Tags(self.start, self.end, self.solution_start, self.solution_end, opened=True)
        return parse_tagged(completion, tags, grade_unfinished=self.grade_unfinished)
