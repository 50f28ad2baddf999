"""What is asked of the policy: attempts at one problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lemma.core.types import Problem
from lemma.engines.protocol import Completion, Key, Request, Sampling
from lemma.rollouts.episode import Episode, Turn

NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class SampleRequest:
    """`n` attempts at one problem, numbered from `first`. A `prefix` begins the response on a teacher's behalf.

    The engine knows it by its key, or by `name`, where noise other than the key's is wanted.
    """

    key: Key
    problem: Problem
    prompt: np.ndarray
    n: int = 1
    prefix: np.ndarray = field(default_factory=lambda: NOTHING)
    first: int = 0
    name: Key | None = None

    @cached_property
    def read(self) -> np.ndarray:
        """The prompt as all its attempts have it."""
        return self.prompt.astype(np.int32)

    @property
    def request_key(self) -> Key:
        return self.name or self.key

    def request(self, sampling: Sampling) -> Request:
        """Of a response that is begun on a teacher's behalf, the rest."""
        if given := len(self.prefix):
            least, most = max(0, sampling.min_tokens - given), sampling.max_tokens - given
            sampling = replace(sampling, max_tokens=most, min_tokens=least)
        return Request(self.request_key, np.concatenate([self.prompt, self.prefix]).astype(np.int64), sampling, self.n)

    def known(self, episodes: Mapping[tuple[str, int], Episode]) -> list[Episode]:
        """Those of its attempts that are among these."""
        if not episodes:
            return []
        key = repr(self.key)
        there = [episodes.get((key, self.first + i)) for i in range(self.n)]
        return [episode for episode in there if episode is not None]

    def episode(self, completion: Completion) -> Episode:
        """An episode whose first turn is this completion, the teacher's prefix in front."""
        turn = turn_of(completion, self.read, self.prefix)
        return Episode(self.key, self.first + completion.sample, self.problem.id, [turn], self.problem.question)


def turn_of(
    completion: Completion, context: np.ndarray, prefix: np.ndarray = NOTHING, *, extends: bool = False
) -> Turn:
    """A completion as a turn, after what was new to the policy; a teacher's prefix stands in front."""
    given, versions = len(prefix), completion.spans or ((0, completion.policy_version),)
    ids, logprobs, kept = completion.ids, completion.logprobs, completion.kept
    if given:
        versions = tuple((first and first + given, version) for first, version in versions)
        gap = np.zeros(given, dtype=np.float32)
        ids, logprobs, kept = (np.concatenate(pair) for pair in ((prefix, ids), (gap, logprobs), (gap, kept)))
    return Turn(
        context=context,
        ids=ids.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        kept=kept.astype(np.float32),
        finish=completion.finish,
        versions=versions,
        given=given,
        extends=extends,
        seconds=completion.seconds,
    )
