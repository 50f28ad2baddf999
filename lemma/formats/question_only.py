r"""The bare question; the answer is the content of the last \boxed{}."""

from __future__ import annotations

from typing import Literal

from lemma.formats.boxes import compose_boxed, parse_boxed
from lemma.formats.format import Format
from lemma.formats.tags import Parsed
from lemma.formats.templates import opening_lines, quote

TURNS = r"""{%- for turn in turns %}
{{- turn['content'] }}{%- if turn['role'] == 'assistant' %}{{- eos_token or '' }}{%- endif %}
{%- endfor %}"""


class QuestionOnly(Format):
    r"""The question and nothing else, then `reasoning ... \boxed{answer}`. Drops a problem's own system message."""

    name: Literal["question_only"] = "question_only"
    """The bare question."""

    @property
    def chat_template(self) -> str:
        front = "{{- " + quote(self.system + "\n\n") + " }}\n" if self.system else ""
        return opening_lines("", self.bos) + front + TURNS

    def compose(self, reasoning: str, answer: str) -> str:
        return compose_boxed(reasoning, answer)

    def parse(self, completion: str) -> Parsed:
        return parse_boxed(completion)
