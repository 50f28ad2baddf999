"""Jinja text that is safe whatever it quotes, and rendering it exactly as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lemma.core.deadlines import Overdue, cpu_limit
from lemma.core.errors import UserError

# A conversation is written in less than a millisecond.
RENDER_SECONDS = 10.0

if TYPE_CHECKING:
    from jinja2 import Template


def quote(text: str) -> str:
    """A Jinja string literal with that value.

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
    """Another's template, with that system message where the conversation has none."""
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
    """Another's template, which then takes no notice of a conversation's own system message."""
    return SILENCE + template.removeprefix(SILENCE)


def with_suffix(template: str, suffix: str) -> str:
    """Another's template, with that text at the end of everything the user says."""
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
    """Another's template in which today is always the same day: a prompt must not change overnight."""
    return CLOCK + template if "strftime_now" in template and CLOCK not in template else template


def chatml(default_system: str, bos: bool | None, generation: str = "") -> str:
    """Turns between <|im_start|> and <|im_end|>; the assistant's end in EOS, which is what it learns to say."""
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
    """Within `with`, a template of somebody else writes `about`: whatever it does, it ends, or in one sentence."""
    whose = "the tokenizer's chat template"
    try:
        with cpu_limit(RENDER_SECONDS):
            yield
    except Overdue:
        raise UserError(f"{whose} has not written {about} after {RENDER_SECONDS:g} s of computing", fix=fix) from None
    except Exception as error:  # a template can raise what any Python code can
        reason = str(error) or type(error).__name__
        raise UserError(f"{whose} refuses {about}: {reason}", fix=fix) from error


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)


def render(template: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, is_open: bool = True) -> str:
    """What `tokenizer.apply_chat_template` would give for a template of ours; open ends where the assistant speaks."""
    return _compiled(template).render(
        messages=list(messages),
        add_generation_prompt=is_open,
        bos_token=getattr(tokenizer, "bos_token", None),
        eos_token=getattr(tokenizer, "eos_token", None),
    )
