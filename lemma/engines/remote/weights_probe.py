"""Do a server (or vLLM in this process) and the policy hold the same weights? Both score the same few tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lemma.core.types import Trajectory
from lemma.engines.protocol import EngineError
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy

PROMPT_TOKENS = 24
NEW_TOKENS = 16
EXACT = 1e-4  # float32: the largest difference of any token
ROUNDED = 0.05  # half precision: the mean difference


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """A prompt with the tokens that were sampled after it, and the sampler's log-probabilities of the last of these.

    With adapters only the sampled tokens have one: vLLM 0.31 mixes up rows when it scores a prompt under an adapter.
    """

    ids: list[int]
    logprobs: list[float]

    def gaps(self, other: Sequence[float]) -> np.ndarray:
        """Absolute differences from the log-probabilities of the same tokens elsewhere."""
        count = len(self.logprobs)
        return np.abs(np.array(other[-count:], dtype=np.float64) - np.array(self.logprobs))


def probe_prompt(policy: Policy, context: int) -> list[int]:
    """Ids from all over the vocabulary."""
    count = max(2, min(PROMPT_TOKENS, context - NEW_TOKENS))
    return [(i * 7919 + 13) % policy.head.weight.shape[0] for i in range(count)]


def probe_arguments(policy: Policy) -> dict[str, Any]:
    """Sampling parameters of the probe; with a fixed seed, the same weights give the same tokens."""
    fixed = {"temperature": 1.0, "seed": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0}
    return fixed if policy.is_adapter else fixed | {"prompt_logprobs": 0}


@torch.no_grad()
def policy_logprobs(policy: Policy, ids: list[int]) -> np.ndarray:
    """The learner's log-probability of every token but the first, without dropout."""
    array = np.array(ids, dtype=np.int64)
    batch = TokenBatch.build([Trajectory(array, np.arange(len(array)) > 0)], [0], policy.device)
    training = policy.module.training
    policy.module.eval()
    logprobs = policy.logprobs(batch)
    policy.module.train(training)
    return logprobs.float().cpu().numpy()


def compare(policy: Policy, before: ProbeScores, now: ProbeScores) -> None:
    """Check that a server samples and scores the same as before its restart."""
    gap = _sum_up(policy, before.gaps(now.logprobs)) if before.ids == now.ids else math.inf
    if not gap <= _limit(policy):
        raise EngineError(f"a server came back with other weights: log-probabilities differ by {gap:.2g}")


def _sum_up(policy: Policy, gaps: np.ndarray) -> float:
    """The largest difference in float32; the mean difference in half precision."""
    return float(gaps.max() if policy.dtype == torch.float32 else gaps.mean())


def _limit(policy: Policy) -> float:
    return EXACT if policy.dtype == torch.float32 else ROUNDED


def verify(policy: Policy, scored: ProbeScores, version: int, who: str = "vLLM") -> float:
    """The difference; raises if it is too large."""
    largest, limit = _sum_up(policy, scored.gaps(policy_logprobs(policy, scored.ids).tolist())), _limit(policy)
    if not largest <= limit:
        raise EngineError(
            f"{who} does not hold the policy's weights after the update to version {version}: "
            f"log-probabilities differ by {largest:.2g}, more than {limit:g}",
            fix="write `engine: native`, or report this with the versions that `lemma doctor` prints",
        )
    return largest
