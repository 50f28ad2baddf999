"""Reasoning and answer in XML tags on separate lines."""

from __future__ import annotations

from typing import Literal

from lemma.formats.chat import ChatFormat
from lemma.formats.tags import GradeUnfinished, Parsed, Tags, parse_tagged

SYSTEM = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""
TAGS = Tags("<reasoning>", "</reasoning>", "<answer>", "</answer>", opened=False)


class Xml(ChatFormat):
    """Chat turns, then `<reasoning>`, `</reasoning>`, `<answer>` and `</answer>` on lines of their own."""

    name: Literal["xml"] = "xml"
    """Reasoning and answer in XML tags."""
    grade_unfinished: GradeUnfinished = False

    @property
    def default_system(self) -> str:
        return SYSTEM

    def compose(self, reasoning: str, answer: str) -> str:
        return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>\n"

    def parse(self, completion: str) -> Parsed:
        return parse_tagged(completion, TAGS, grade_unfinished=self.grade_unfinished)
