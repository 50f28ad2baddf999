"""Do both sides hold the same weights? The same few tokens are scored by vLLM and by the policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lemma.core.types import Trajectory
from lemma.engines.base import EngineError
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy

PROMPT_TOKENS = 24
NEW_TOKENS = 8
EXACT = 1e-4  # float32: the largest difference of any token
ROUNDED = 0.05  # half precision: the mean difference


@dataclass(frozen=True, slots=True)
class Scored:
    """A prompt with what followed it, and vLLM's log-probability of every token but the first."""

    ids: list[int]
    logprobs: list[float]


def probe_prompt(policy: Policy, context: int) -> list[int]:
    """Ids from all over the vocabulary."""
    count = max(2, min(PROMPT_TOKENS, context - NEW_TOKENS))
    return [(i * 7919 + 13) % policy.head.weight.shape[0] for i in range(count)]


@torch.no_grad()
def policy_logprobs(policy: Policy, ids: list[int]) -> np.ndarray:
    """The learner's log-probability of every token but the first, without dropout."""
    array = np.array(ids, dtype=np.int64)
    batch = TokenBatch.build([Trajectory(array, np.arange(len(array)) > 0)], [0], policy.device)
    training = policy.module.training
    policy.module.eval()
    logprobs, _ = policy.logprobs(batch)
    policy.module.train(training)
    return logprobs.float().cpu().numpy()


def difference(policy: Policy, scored: Scored) -> float:
    """The largest difference in float32; the mean one where both sides round."""
    gaps = np.abs(policy_logprobs(policy, scored.ids) - np.array(scored.logprobs, dtype=np.float32))
    return float(gaps.max() if policy.head.weight.dtype == torch.float32 else gaps.mean())


def verify(policy: Policy, scored: Scored, version: int) -> float:
    """The difference, or an error where it is too large."""
    found = difference(policy, scored)
    limit = EXACT if policy.head.weight.dtype == torch.float32 else ROUNDED
    if not found <= limit:
        raise EngineError(
            f"vLLM does not hold the policy's weights after the update to version {version}: "
            f"log-probabilities differ by {found:.2g}, more than {limit:g}",
            fix="write `engine: native`, or report this with the versions that `lemma doctor` prints",
        )
    return found
