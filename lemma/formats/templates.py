"""Jinja templates that are safe whatever text they quote, rendered exactly as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lemma.core.deadlines import Overdue, cpu_limit
from lemma.core.errors import UserError

# Rendering a conversation normally takes less than a millisecond.
RENDER_SECONDS = 10.0

if TYPE_CHECKING:
    from jinja2 import Template


def quote(text: str) -> str:
    """A Jinja string literal with this value.

    Jinja reads escapes as Python does, so JSON's quoting fits, except for the surrogate pairs of its ASCII mode.
    """
    return json.dumps(text, ensure_ascii=False)


def opening_lines(default_system: str, bos: bool | None) -> str:
    """The start of every template of ours: sets `system` (the message's or the default) and `turns`, then BOS."""
    return (
        "{%- if messages[0]['role'] == 'system' %}"
        "{%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}"
        "{%- else %}"
        f"{{%- set system = {quote(default_system)} %}}{{%- set turns = messages %}}"
        "{%- endif %}\n" + ("{{- bos_token or '' }}\n" if bos else "")
    )


def with_default_system(template: str, system: str) -> str:
    """A third-party template, with this system message if the conversation has none."""
    if not system:
        return template
    front = (
        "{%- if messages[0]['role'] != 'system' %}"
        f"{{%- set messages = [{{'role': 'system', 'content': {quote(system)}}}] + messages %}}"
        "{%- endif %}"
    )
    return template if template.startswith(front) else front + template


SILENCE = "{%- if messages[0]['role'] == 'system' %}{%- set messages = messages[1:] %}{%- endif %}"


def without_system(template: str) -> str:
    """A third-party template that ignores a conversation's own system message."""
    return SILENCE + template.removeprefix(SILENCE)


def with_suffix(template: str, suffix: str) -> str:
    """A third-party template, with this text appended to every user message."""
    if not suffix:
        return template
    front = (
        "{%- set said = namespace(turns=[]) %}{%- for turn in messages %}{%- set said.turns = said.turns + [{'role': "
        "'user', 'content': turn['content'] + " + quote(suffix) + "} if turn['role'] == 'user' else turn] %}"
        "{%- endfor %}{%- set messages = said.turns %}"
    )
    return template if front in template else front + template


CLOCK = "{%- macro strftime_now(format) %}26 Jul 2024{%- endmacro %}"


def without_clock(template: str) -> str:
    """A third-party template with a fixed date: a prompt must not change overnight."""
    return CLOCK + template if "strftime_now" in template and CLOCK not in template else template


def chatml(default_system: str, bos: bool | None, generation: str = "") -> str:
    """Turns between <|im_start|> and <|im_end|>; the assistant's end in EOS, which it learns to generate."""
    return (
        opening_lines(default_system, bos)
        + r"""{%- if system %}{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}{%- endif %}
{%- for turn in turns %}
{{- '<|im_start|>' + turn['role'] + '\n' + turn['content'] }}
{%- if turn['role'] == 'assistant' %}{{- (eos_token or '') + '\n' }}{%- else %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + """
        + quote(generation)
        + " }}{%- endif %}"
    )


@contextmanager
def rendering(about: str, fix: str) -> Iterator[None]:
    """Context in which a third-party template renders `about`: it ends in time, and its errors become one sentence."""
    whose = "the tokenizer's chat template"
    try:
        with cpu_limit(RENDER_SECONDS):
            yield
    except Overdue:
        raise UserError(f"{whose} has not written {about} after {RENDER_SECONDS:g} s of computing", fix=fix) from None
    except Exception as error:  # a template can raise anything that Python code can
        reason = str(error) or type(error).__name__
        raise UserError(f"{whose} refuses {about}: {reason}", fix=fix) from error


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)


def render(template: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, is_open: bool = True) -> str:
    """What `tokenizer.apply_chat_template` would return for a template of ours; `is_open` ends where the assistant
    speaks."""
    return _compiled(template).render(
        messages=list(messages),
        add_generation_prompt=is_open,
        bos_token=getattr(tokenizer, "bos_token", None),
        eos_token=getattr(tokenizer, "eos_token", None),
    )
