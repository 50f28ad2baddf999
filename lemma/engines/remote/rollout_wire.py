"""What is sent between a client and a native generation server: requests and completions as JSON.

Numbers in float32 are written so that they are read back to the last bit.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import numpy as np

from lemma.engines.protocol import Completion, EngineError, Key, Request, Sampling

NAMES = tuple(field.name for field in fields(Completion))
ARRAYS = {"ids": np.int64, "logprobs": np.float32, "kept": np.float32}
LOAD, WEIGHTS, PROBE, GENERATE, END = (
    f"/lemma/{what}" for what in ("load", "weights", "probe", "generate", "end")
)  # fmt: skip


def request_as_json(request: Request) -> dict[str, Any]:
    sampling = asdict(request.sampling)
    return {"key": list(request.key), "prompt": request.prompt.tolist(), "n": request.n, "sampling": sampling}


def request_of(content: Any) -> Request:
    """Raises EngineError for what is not a request."""
    try:
        given = dict(content["sampling"])
        given |= {name: tuple(given[name]) for name in ("stop", "stop_ids") if name in given}
        prompt = np.array(content["prompt"], dtype=np.int64)
        return Request(key_of(content["key"]), prompt, Sampling(**given), int(content.get("n", 1)))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"this is not a request for samples: {type(error).__name__}: {error}") from error


def key_of(content: Any) -> Key:
    return tuple(part if isinstance(part, int) else str(part) for part in content)


def completion_as_json(completion: Completion) -> dict[str, Any]:
    content = {name: getattr(completion, name) for name in NAMES}
    return content | {name: content[name].tolist() for name in ARRAYS}


def completion_of(content: Any) -> Completion:
    arrays = {name: np.array(content[name], dtype) for name, dtype in ARRAYS.items()}
    spans = tuple((first, version) for first, version in content["spans"])
    given = {name: content[name] for name in NAMES} | arrays
    return Completion(**given | {"key": key_of(content["key"]), "spans": spans})
