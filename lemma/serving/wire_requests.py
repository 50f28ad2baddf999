"""A client's request, parsed and checked: no field is silently ignored, unless it has no effect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lemma.serving.wire_errors import ApiError

Kind = Literal["chat", "text"]

MOST_SAMPLES = 128
# Each token of an answer is compared with the stop texts, in the threads that all clients share.
MOST_STOPS, LONGEST_STOP = 16, 256
# As vLLM's.
MOST_LIKELIEST = 20
# Answers of a request for the likeliest tokens: others wait while each is scored.
MOST_SCORED = 8
# No vocabulary is larger, and no number in a call may be.
MOST_IDS, LARGEST = 2**31, 2.0**63
# Below it, logits divided by the temperature overflow, and the error would hit the whole batch.
LEAST_TEMPERATURE = 1e-5
# The default of OpenAI's completions. A chat answer may fill the context.
TEXT_TOKENS = 16

# Fields that do not change an answer.
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
COUNTS: dict[str, tuple[int, int]] = {"n": (1, MOST_SAMPLES), "top_k": (0, 2**31), "min_tokens": (0, 2**31)}
# Fields that are not supported, with the values that are accepted because they change nothing.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "tool_choice": ("auto", "none"), "echo": (False,),
    "suffix": ("",), "best_of": (1,),
}  # fmt: skip
COMMON = frozenset(
    ["model", "max_tokens", "stop", "seed", "stream", "stream_options", "logprobs", "return_token_ids"]
) | {*NUMBERS, *COUNTS}
FIELDS: dict[Kind, frozenset[str]] = {
    "chat": COMMON
    | {"messages", "tools", "top_logprobs", "max_completion_tokens", "continue_final_message", "add_generation_prompt"},
    "text": COMMON | {"prompt"},
}
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True)
class WireCall:
    """One call. Either `messages` or `prompts` is empty; `given` are the names of all fields that were sent.

    If it `continues`, the last message is the assistant's, and the answer goes on from its text.
    """

    kind: Kind
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    continues: bool = False
    prompts: tuple[str | tuple[int, ...], ...] = ()
    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    likeliest: int = 0
    token_ids: bool = False
    given: frozenset[str] = field(default_factory=frozenset)


def read_call(kind: Kind, body: Any) -> WireCall:
    """Parse the call in a JSON body; raises ApiError if it is invalid."""
    if not isinstance(body, Mapping):
        raise ApiError(400, "the body is not a JSON object")
    sent = {name: value for name, value in body.items() if value is not None and name not in WITHOUT_EFFECT}
    for name, value in sent.items():
        if name in NOT_OFFERED and value not in NOT_OFFERED[name]:
            raise ApiError(400, _not_offered(name, value), param=name, code="unsupported_parameter")
        if name not in NOT_OFFERED and name not in FIELDS[kind]:
            raise ApiError(400, f"there is no field '{name}' here", param=name, code="unknown_parameter")
    values: dict[str, Any] = {name: _number(sent, name, *limits) for name, limits in NUMBERS.items() if name in sent}
    values |= {name: _count(sent, name, *limits) for name, limits in COUNTS.items() if name in sent}
    if 0 < values.get("temperature", 0.0) < LEAST_TEMPERATURE:
        raise ApiError(400, f"temperature is so low that logits overflow; write 0, or {LEAST_TEMPERATURE:g} and more",
                       param="temperature")  # fmt: skip
    if values.get("top_p") == 0:
        raise ApiError(400, "top_p is 0; write a number above it", param="top_p")
    limit = next((name for name in ("max_completion_tokens", "max_tokens") if name in sent), None)
    values["max_tokens"] = _count(sent, limit, 1, 2**31) if limit else TEXT_TOKENS if kind == "text" else None
    if values["max_tokens"] is not None and values.get("min_tokens", 0) > values["max_tokens"]:
        raise ApiError(400, "min_tokens is above max_tokens", param="min_tokens")
    prompts = _prompts(sent.get("prompt")) if kind == "text" else ()
    if len(prompts) * values.get("n", 1) > MOST_SAMPLES:
        raise ApiError(400, f"prompts times n is more than {MOST_SAMPLES}; send several requests", param="n")
    messages = _messages(sent.get("messages")) if kind == "chat" else ()
    logprobs, likeliest = _logprobs(kind, sent)
    if likeliest and max(1, len(prompts)) * values.get("n", 1) > MOST_SCORED:
        raise ApiError(400, f"the likeliest tokens take another pass for each answer; ask for at most {MOST_SCORED} "
                       "answers with them", param="n")  # fmt: skip
    return WireCall(
        kind,
        messages=messages,
        continues=_continues(sent, messages),
        tools=() if sent.get("tool_choice") == "none" else _tools(sent.get("tools", [])),
        prompts=prompts,
        model=_text(sent, "model"),
        stop=_stops(sent.get("stop", [])),
        seed=_count(sent, "seed", -(2**63), 2**63) if "seed" in sent else None,
        stream=_flag(sent, "stream"),
        stream_usage=_flag(_mapping(sent, "stream_options"), "include_usage"),
        logprobs=logprobs,
        likeliest=likeliest,
        token_ids=_flag(sent, "return_token_ids"),
        given=frozenset(sent),
        **values,
    )


def _not_offered(name: str, value: Any) -> str:
    if name == "tool_choice":
        return "a model is not forced to call tools; write auto or none"
    return f"{name} is not offered; leave it out"


def _logprobs(kind: Kind, sent: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether log-probabilities are told, and of how many of the likeliest tokens besides. In a chat two fields say so,
    in text completions one number does."""
    if kind == "text" and not isinstance(sent.get("logprobs"), bool):
        return "logprobs" in sent, _count(sent, "logprobs", 0, MOST_LIKELIEST) if "logprobs" in sent else 0
    wanted = _flag(sent, "logprobs")
    count = _count(sent, "top_logprobs", 0, MOST_LIKELIEST) if "top_logprobs" in sent else 0
    if count and not wanted:
        raise ApiError(400, "top_logprobs come with the others; write `logprobs: true` as well", param="top_logprobs")
    return wanted, count


def _continues(sent: Mapping[str, Any], messages: tuple[dict[str, Any], ...]) -> bool:
    """Whether the last message is continued: the assistant's is, unless a new turn is asked for."""
    begins, continues = (
        _flag(sent, name) if name in sent else None for name in ("add_generation_prompt", "continue_final_message")
    )
    if begins is not None and begins == continues:
        message = "exactly one of add_generation_prompt and continue_final_message can be true; leave one of them out"
        raise ApiError(400, message, param="continue_final_message")
    is_begun = bool(messages) and messages[-1]["role"] == "assistant"
    if (continues or begins is False) and not is_begun:
        message = "only a message of the assistant can be continued, and the last is none; leave out "
        name = "continue_final_message" if continues else "add_generation_prompt"
        raise ApiError(400, message + name, param=name)
    return is_begun and not begins and continues is not False


def _messages(given: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(given))


def _message(given: Any, place: str) -> dict[str, Any]:
    """A message with the fields that templates and comparisons use: role, content, name, tool calls and their ids."""
    if not isinstance(given, Mapping):
        raise ApiError(400, f"{place} is not an object", param=place)
    role = ROLES.get(str(given.get("role")))
    if role is None:
        raise ApiError(400, f"{place} has the role '{given.get('role')}'; there are: {', '.join(ROLES)}", param=place)
    message: dict[str, Any] = {"role": role, "content": _content(given.get("content"), f"{place}.content")}
    if role == "assistant" and given.get("tool_calls"):
        calls = given["tool_calls"]
        is_list = isinstance(calls, list)
        message["tool_calls"] = [_call(one, f"{place}.tool_calls") for one in (calls if is_list else [calls])]
    elif role != "assistant" and given.get("content") is None:
        raise ApiError(400, f"{place} has no content", param=f"{place}.content")
    for name in ("name", "tool_call_id"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def _content(given: Any, place: str) -> str:
    """The text of `content`; text parts are joined, other parts are refused."""
    if given is None or isinstance(given, str):
        return given or ""
    if isinstance(given, list):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in given
        ]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise ApiError(400, f"{place} is not text, and only text is read here", param=place)


def _call(given: Any, place: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{place} holds something that is not a call of a function", param=place)
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        raise ApiError(400, f"{place}: arguments are JSON text", param=place)
    inner = {"name": function["name"], "arguments": arguments}
    return {"id": str(given.get("id", "")), "type": "function", "function": inner}


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list):
        raise ApiError(400, "tools is not a list", param="tools")
    for tool in given:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError(400, "a tool is an object of the type function, with a name", param="tools")
    return tuple(dict(tool) for tool in given)


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each text or token ids."""
    several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if len(several) > MOST_SAMPLES:
        raise ApiError(400, f"there are more than {MOST_SAMPLES} prompts; send several requests", param="prompt")
    prompts: list[str | tuple[int, ...]] = []
    for one in several:
        if isinstance(one, str) and one:
            prompts.append(one)
        elif isinstance(one, list) and one and all(isinstance(token, int) and 0 <= token < MOST_IDS for token in one):
            prompts.append(tuple(one))
        else:
            raise ApiError(400, "prompt is not a text, a list of token ids, or a list of either", param="prompt")
    return tuple(prompts)


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ApiError(400, "stop is not a text or a list of texts", param="stop")
    if len(stops) > MOST_STOPS:
        raise ApiError(400, f"stop has more than {MOST_STOPS} texts", param="stop")
    if max(map(len, stops), default=0) > LONGEST_STOP:
        raise ApiError(400, f"stop has a text of more than {LONGEST_STOP} characters", param="stop")
    return tuple(stops)


def _number(sent: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = sent[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f"{name} is not a number", param=name)
    number = float(value) if abs(value) <= LARGEST else math.inf
    if not least <= number <= most:
        raise ApiError(400, f"{name} is {number:g}; write a number from {least:g} to {most:g}", param=name)
    return number


def _count(sent: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = sent[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(400, f"{name} is not a whole number", param=name)
    if not least <= value <= most:
        raise ApiError(400, f"{name} is {value}; write a number from {least} to {most}", param=name)
    return value


def _flag(sent: Mapping[str, Any], name: str) -> bool:
    value = sent.get(name) or False
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is neither true nor false", param=name)
    return value


def _mapping(sent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = sent.get(name, {})
    if not isinstance(value, Mapping):
        raise ApiError(400, f"{name} is not an object", param=name)
    return value


def _text(sent: Mapping[str, Any], name: str) -> str | None:
    value = sent.get(name)
    if value is not None and not isinstance(value, str):
        raise ApiError(400, f"{name} is not a text", param=name)
    return value
