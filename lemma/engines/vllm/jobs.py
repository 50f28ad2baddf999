"""One job is one sample of a request: what vLLM is sent, and the completion made from its answer."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from lemma.core.random import key as random_key
from lemma.core.types import Finish
from lemma.engines.protocol import Completion, EngineError, Request
from lemma.engines.sampling import cuts_support, end_ids
from lemma.engines.stop_strings import StopWatcher

ARGUMENT = "lemma"  # the extra argument of a request that carries its name and its cuts
NAME_PARTS = 3  # of a job's name: the engine's prefix, the number of the request, the number of the sample


@dataclass(slots=True, eq=False)
class Job:
    """`name` is unique within an engine; `submitted` is the time of the request. `versions` has a pair for each span
    sampled by one version of the weights: the index of its first token, and the version."""

    name: str
    request: Request
    sample: int
    versions: list[tuple[int, int]]
    submitted: float
    is_sampled: bool = False  # vLLM has all its tokens, and the answer is on its way

    @property
    def label(self) -> str:
        return "/".join(map(str, self.request.key))

    def start_span(self, count: int, version: int) -> None:
        """Tokens after the first `count` come from this version."""
        self.versions = [*(span for span in self.versions if span[0] < count), (count, version)]

    def spans(self, length: int) -> tuple[tuple[int, int], ...]:
        """The spans of a response of this length, if there are several."""
        within = tuple(span for span in self.versions if span[0] < length)
        return within if len(within) > 1 else ()


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """vLLM's answer to a finished job: ids, log-probabilities after all cuts, and the finish reason."""

    ids: list[int]
    sampler_logprobs: list[float]
    reason: str


def needs_cuts(job: Job) -> bool:
    """Whether Lemma's logits processor is needed; otherwise nothing is cut and the kept mass is 1."""
    sampling = job.request.sampling
    cuts = cuts_support(sampling) and sampling.temperature > 0
    return cuts or sampling.min_tokens > 0 or sampling.repetition_penalty != 1.0


def job_name(request: str) -> str:
    """A job's name from the request id that vLLM made of it: `cmpl-NAME-0`, possibly with a suffix."""
    return "-".join(request.removeprefix("cmpl-").split("-")[:NAME_PARTS])


def extra_of(job: Job, eos: int) -> str:
    """The name of a job and its cuts, if it has any, for `lemma.engines.vllm.vllm_worker.parse`."""
    sampling = job.request.sampling
    if not needs_cuts(job):
        return json.dumps({"name": job.name})
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens")
    values = {name: getattr(sampling, name) for name in names}
    return json.dumps({"name": job.name, "sampling": values, "ends": list(end_ids(sampling, eos))})


def arguments(job: Job, seed: int, eos: int, context: int) -> dict[str, Any]:
    """Sampling parameters that vLLM's own class and its server share.

    vLLM samples and applies the temperature; every cut is Lemma's, in the worker. All end ids are listed.
    """
    sampling = job.request.sampling
    return {
        "temperature": sampling.temperature,
        "max_tokens": min(sampling.max_tokens, context - len(job.request.prompt)),
        "min_tokens": min(sampling.min_tokens, sampling.max_tokens, context - len(job.request.prompt)),
        "seed": random_key(seed, "vllm", *job.request.key, job.sample) % 2**63,
        "logprobs": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(end_ids(sampling, eos)),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
    }


def finish(job: Job, answer: JobAnswer, kept: list[float] | None, tokenizer: Any) -> Completion:
    """The completion. It ends where a stop string ends, even if vLLM noticed it a token later."""
    ids = np.array(answer.ids, dtype=np.int64)
    drawn = np.array(answer.sampler_logprobs, dtype=np.float32)
    mass = np.zeros(len(ids), dtype=np.float32) if kept is None else np.array(kept, dtype=np.float32)
    if not (np.isfinite(drawn).all() and np.isfinite(mass).all() and len(drawn) == len(ids)):
        raise not_finite(job)
    end = _stop_string_end(job, answer.ids, tokenizer)
    reason: Finish = "stop" if answer.reason == "stop" or end is not None else "length"
    part = slice(0, end)
    return Completion(
        job.request.key,
        job.sample,
        ids[part],
        (drawn + mass)[part],
        mass[part],
        reason,
        job.versions[0][1],
        time.monotonic() - job.submitted,
        spans=job.spans(len(ids[part])),
    )


def cancelled(job: Job) -> Completion:
    """Empty: vLLM does not return the tokens of a cancelled request."""
    none = np.zeros(0, dtype=np.float32)
    seconds = time.monotonic() - job.submitted
    version = job.versions[0][1]
    return Completion(job.request.key, job.sample, np.zeros(0, np.int64), none, none, "cancelled", version, seconds)


def not_finite(job: Job) -> EngineError:
    return EngineError(
        f"the model's logits are not finite for request {job.label}, which is dropped",
        fix="look at the weights: a learning rate that is too high makes them NaN",
    )


def _stop_string_end(job: Job, ids: list[int], tokenizer: Any) -> int | None:
    sampling = job.request.sampling
    if not sampling.stop:
        return None
    watcher = StopWatcher(tokenizer, sampling.stop)
    ends = (count for count, token in enumerate(ids, 1) if watcher.feed(token) and count > sampling.min_tokens)
    return next(ends, None)
