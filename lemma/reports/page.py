"""The page itself: one self-contained HTML file, which needs neither a network nor a server.

Everything from a run is embedded as compressed JSON in base64, and the script inserts it as text: nothing that a model
wrote is ever parsed as HTML. The page's content security policy allows only its own script and style.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("store.js", "chart.js", "dom.js", "overview.js", "curves.js", "evaluations.js", "completions.js", "main.js")


def packed(content: Any) -> str:
    """JSON, compressed, as text that is safe anywhere in HTML. The same content gives the same text."""
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


def make_page(title: str, data: str, chunks: Mapping[str, str], *, live: bool = False) -> str:
    """`data` and `chunks` are packed. A live page asks the server that it came from for both instead."""
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}\n}})();\n'
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        f"connect-src {'*self*' if live else '*none*'}; base-uri 'none'; form-action 'none'"
    ).replace("*", "'")
    blocks = [
        f'<script type="text/plain" class="chunk" data-key="{html.escape(key)}">{text}</script>'
        for key, text in chunks.items()
    ]
    parts = {
        "title": html.escape(title),
        "policy": html.escape(policy),
        "style": style,
        "script": script,
        "live": "yes" if live else "no",
        "data": data,
        "chunks": "\n".join(blocks),
    }
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    return Template(template, keep_trailing_newline=True, undefined=StrictUndefined).render(parts)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
