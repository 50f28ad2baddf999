"""Divergence: a run whose numbers are not finite any more stops, and the last checkpoint that is any good stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.learning.optimiser import are_finite
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy

# One bad batch may be skipped; after so many in a row the weights are what is bad.
SKIPS_IN_A_ROW = 5
PROBED_TOKENS = 16


class Diverged(UserError):
    """Numbers that should be finite are not."""


def check_written(folder: Path) -> None:
    """Refuse model files with weights that are not finite, such as an adapter that overflows where it is merged."""
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dictionary)
                if not are_finite([weights.get_tensor(name)]):
                    raise Diverged(f"{name} of its final model is not finite")


@torch.no_grad()
def check_finite(policy: Policy) -> None:
    """Refuse a model whose weights are finite but so large that its log-probabilities are not."""
    ids = np.arange(PROBED_TOKENS, dtype=np.int64) % len(policy.head.weight)
    batch = TokenBatch.build([Trajectory(ids, np.arange(len(ids)) > 0)], [0], policy.device)
    policy.module.eval()
    if not are_finite([policy.logprobs(batch)]):
        raise Diverged("the log-probabilities of the model are not finite")
