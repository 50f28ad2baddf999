"""What is sent between a client and a native generation server: requests and completions as JSON.

Numbers in float32 are written so that they are read back to the last bit.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from lemma.engines.protocol import Completion, EngineError, Key, Request, Sampling

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
    content = {
        "key": list(completion.key),
        "sample": completion.sample,
        "ids": completion.ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
        "finish": completion.finish,
        "version": completion.policy_version,
        "seconds": completion.seconds,
        "first_seconds": completion.first_seconds,
    }
    if completion.kept.any():
        content["kept"] = completion.kept.tolist()
    if completion.spans:
        content["spans"] = completion.spans
    return content


def completion_of(content: Any) -> Completion:
    ids = np.array(content["ids"], dtype=np.int64)
    logprobs = np.array(content["logprobs"], dtype=np.float32)
    kept = np.array(content["kept"], dtype=np.float32) if "kept" in content else np.zeros(len(ids), np.float32)
    if not (len(ids) == len(logprobs) == len(kept)):
        raise ValueError("ids, log-probabilities and kept mass differ in number")
    return Completion(
        key_of(content["key"]),
        int(content["sample"]),
        ids,
        logprobs,
        kept,
        content["finish"],
        int(content["version"]),
        float(content["seconds"]),
        float(content["first_seconds"]),
        tuple((int(first), int(version)) for first, version in content.get("spans", ())),
    )
