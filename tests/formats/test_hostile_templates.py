"""Chat templates that raise, look for files or never end: one sentence, whatever they do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.formats import make_format, templates
from lemma.models.tiny import tiny_tokenizer

PROBLEM = Problem((Message("user", "1 + 1 ?"),), ("2",))


def tokenizer(template: str) -> Any:
    made = tiny_tokenizer()
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ 1 % 0 }}",
        "{% include 'secrets.txt' %}",
        "{% import 'os' as os %}",
        "{{ messages[7]['content'] }}",
        "{{ messages[0].content.no.such }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{{ nothing() }}",
        "{{ [] + 3 }}",
    ],
)
def test_a_template_that_fails_is_one_sentence(template: str) -> None:
    with pytest.raises(UserError, match=r"the tokenizer's chat template refuses .*; write `template: own`") as refused:
        make_format("boxed").prompt(PROBLEM, tokenizer(template))
    assert "\n" not in str(refused.value)


def test_a_template_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.3)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(UserError, match=r"has not written .* after 0.3 s of computing; write `template: own`"):
        make_format("boxed").prompt(PROBLEM, tokenizer(endless + "{% endfor %}{% endfor %}"))
    assert time.monotonic() - began < 20
    assert "1 + 1 ?" in make_format("boxed").prompt(PROBLEM, tokenizer("{{ messages[-1].content }}"))
