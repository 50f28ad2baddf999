"""Tool calls, from the model's text to the API's format."""

from __future__ import annotations

import json
from typing import Any

from lemma.core.types import content_id
from lemma.engines.protocol import Key
from lemma.formats.tool_calls import Style, parse_tool_calls

# The length that the strictest chat templates require.
ID_LENGTH = 9


def read_calls(text: str, style: Style, key: Key, sample: int) -> tuple[str, list[dict[str, Any]]]:
    """The text without the calls, and the calls in the API's format.

    If any call cannot be parsed, the whole text and no calls. The id of a call depends on the request only.
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
