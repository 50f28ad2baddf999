"""HTML in an answer: superscripts, subscripts, entities and style tags become LaTeX or plain characters."""

from __future__ import annotations

import html
import re

_ENTITY = re.compile(r"&(?:#\d{1,6}|#x[0-9A-Fa-f]{1,5}|[A-Za-z]{2,8}\d{0,2});")
_FRACTION = re.compile(r"<sup>\s*(-?\d{1,18})\s*</sup>\s*[/⁄]\s*<sub>\s*(\d{1,18})\s*</sub>", re.IGNORECASE)
_RAISED = re.compile(r"<(sup|sub)>([^<>]{1,200})</\1>", re.IGNORECASE)
_STYLE = re.compile(r"<(b|i|u|em|strong|var|span|p|math|code)(?: [^<>]{0,100})?>([^<>]{0,2000})</\1>", re.IGNORECASE)
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)


def without_html(text: str) -> str:
    """The text with `<sup>`, `<sub>`, entities and pairs of style tags replaced by what they mean."""
    if "&" in text and ";" in text:
        text = _ENTITY.sub(lambda m: html.unescape(m[0]), text)
    if "</" not in text:
        return _BREAK.sub(" ", text) if "<br" in text else text
    text = _FRACTION.sub(r" \\frac{\1}{\2}", text)
    for _ in range(3):
        shorter = _RAISED.sub(lambda m: ("^{" if m[1].lower() == "sup" else "_{") + m[2] + "}", text)
        shorter = _STYLE.sub(r"\2", shorter)
        if shorter == text:
            break
        text = shorter
    return _BREAK.sub(" ", text)
