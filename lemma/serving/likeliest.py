"""The likeliest tokens in the place of each that was sampled: another pass over prompt and answer, as the learner's."""

from __future__ import annotations

import numpy as np
import torch

from lemma.core.types import Trajectory
from lemma.engines.sampling import scale
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy
from lemma.serving.wire_errors import ApiError


@torch.no_grad()
def likeliest(
    policy: Policy, prompt: np.ndarray, ids: np.ndarray, count: int, temperature: float
) -> list[list[tuple[int, float]]]:
    """For each id, `count` tokens and their log-probabilities at the sampling temperature, best first."""
    if not len(ids):
        return []
    whole = np.concatenate([prompt, ids])
    one = Trajectory(whole, np.arange(len(whole)) >= len(prompt))
    try:
        hidden_NH = policy.outputs(TokenBatch.build([one], [0], policy.device), ["hidden"])["hidden"]
        logprobs_NK, tokens_NK = policy.likeliest(hidden_NH, count, temperature=scale(temperature))
    except torch.OutOfMemoryError as error:
        raise ApiError(500, "there is no memory left for the likeliest tokens; ask without them") from error
    return [list(zip(*row, strict=True)) for row in zip(tokens_NK.tolist(), logprobs_NK.tolist(), strict=True)]
