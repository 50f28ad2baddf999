"""Tool calls between what a model writes and what a client reads."""

from __future__ import annotations

import json
from typing import Any

from lemma.core.types import content_id
from lemma.engines.protocol import Key
from lemma.formats.tool_calls import Style, parse_tool_calls

# As long as the strictest of the chat templates wants it.
ID_LENGTH = 9


def read_calls(text: str, style: Style, key: Key, sample: int) -> tuple[str, list[dict[str, Any]]]:
    """What was said apart from the calls, and the calls as a client reads them.

    The whole text, and no call, where one of them cannot be read. The name of a call depends on the request alone.
    """
    spoken = parse_tool_calls(text, style)
    if not spoken.calls or any(call.fault for call in spoken.calls):
        return text, []
    calls = [
        {
            "id": content_id(key, sample, number)[:ID_LENGTH],
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for number, call in enumerate(spoken.calls)
    ]
    return spoken.content, calls
