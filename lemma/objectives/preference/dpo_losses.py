"""One formula per variant of direct preference optimisation, from the log-ratios of the two responses of each pair.

r is log p(response) - log p_ref(response), s its score under the divergence (r for the reverse KL), w and l mark the
chosen and the rejected response, h = s_w - s_l, and sigma is the logistic function. See docs/preference.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]

# EXO compares with the distribution (1 - e, e) of the labels; without smoothing its logarithm would be infinite.
EXO_SMALLEST = 1e-3
LIMIT_OF_ALPHA = 1e-6


@dataclass(frozen=True)
class Margins:
    """What a formula sees of the pairs; every tensor is (U,). Lengths count the tokens of the response."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_score: torch.Tensor
    rejected_score: torch.Tensor
    chosen_length: torch.Tensor
    rejected_length: torch.Tensor
    beta: float
    smoothing: float
    tau: float
    shift: torch.Tensor | float

    @property
    def h(self) -> torch.Tensor:
        return self.chosen_score - self.rejected_score

    @property
    def h_per_token(self) -> torch.Tensor:
        return self.chosen_score / self.chosen_length - self.rejected_score / self.rejected_length

    @property
    def chosen_reward(self) -> torch.Tensor:
        return self.beta * (self.chosen - self.ref_chosen)

    @property
    def rejected_reward(self) -> torch.Tensor:
        return self.beta * (self.rejected - self.ref_rejected)


def score(log_ratio: torch.Tensor, divergence: Divergence, alpha: float) -> torch.Tensor:
    """f'(p / p_ref) of the divergence, up to a constant; exponents are clamped to what float32 can represent."""
    if divergence == "reverse_kl" or (divergence == "alpha" and abs(alpha - 1) < LIMIT_OF_ALPHA):
        return log_ratio
    if divergence == "js":
        return F.logsigmoid(log_ratio)
    power = -1.0 if divergence == "forward_kl" else alpha - 1
    return torch.expm1((power * log_ratio).clamp(max=80.0)) / power


def smoothed(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
    """-log sigma, assuming that a share of the labels is swapped."""
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def sigmoid(m: Margins) -> torch.Tensor:
    return smoothed(m.beta * m.h, m.smoothing)


def sigmoid_norm(m: Margins) -> torch.Tensor:
    return smoothed(m.beta * m.h_per_token, m.smoothing)


def hinge(m: Margins) -> torch.Tensor:
    return F.relu(1 - m.beta * m.h)


def ipo(m: Margins) -> torch.Tensor:
    return (m.h_per_token - 1 / (2 * m.beta)) ** 2


def robust(m: Margins) -> torch.Tensor:
    """Unbiased if a share `smoothing` of the labels is flipped."""
    logits, share = m.beta * m.h, m.smoothing
    return (-(1 - share) * F.logsigmoid(logits) + share * F.logsigmoid(-logits)) / (1 - 2 * share)


def exo(m: Margins) -> torch.Tensor:
    """KL from the policy's preference to that of the labels."""
    logits = m.beta * m.h
    share = torch.tensor(m.smoothing or EXO_SMALLEST, dtype=torch.float64)
    wins = torch.sigmoid(logits) * (F.logsigmoid(logits) - float(torch.log1p(-share)))
    return wins + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - float(torch.log(share)))


def nca(m: Margins) -> torch.Tensor:
    chosen, rejected = m.chosen_reward, m.rejected_reward
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco(m: Margins) -> torch.Tensor:
    """A classifier of single responses; `shift` is the running mean of rewards."""
    return -F.logsigmoid(m.chosen_reward - m.shift) - F.logsigmoid(m.shift - m.rejected_reward)


def sppo(m: Margins) -> torch.Tensor:
    half = 0.5 / m.beta
    return (m.chosen - m.ref_chosen - half) ** 2 + (m.rejected - m.ref_rejected + half) ** 2


def aot(m: Margins) -> torch.Tensor:
    """The policy's margins, sorted over the batch, against the reference's."""
    mine, reference = (m.chosen - m.rejected).sort(stable=True)[0], (m.ref_chosen - m.ref_rejected).sort(stable=True)[0]
    return smoothed(m.beta * (mine - reference), m.smoothing)


def aot_unpaired(m: Margins) -> torch.Tensor:
    """Log-ratios of the chosen, sorted over the batch, against those of the rejected."""
    chosen, rejected = (
        (m.chosen - m.ref_chosen).sort(stable=True)[0],
        (m.rejected - m.ref_rejected).sort(stable=True)[0],
    )
    return smoothed(m.beta * (chosen - rejected), m.smoothing)


def apo_zero(m: Margins) -> torch.Tensor:
    return torch.sigmoid(-m.chosen_reward) + torch.sigmoid(m.rejected_reward)


def apo_down(m: Margins) -> torch.Tensor:
    return torch.sigmoid(m.chosen_reward) + torch.sigmoid(m.rejected_reward - m.chosen_reward)


def discopop(m: Margins) -> torch.Tensor:
    """Logistic if the pair is ranked wrong, exponential if right, blended by sigma(beta h / tau)."""
    logits = m.beta * m.h
    right = logits / m.tau
    # The exponential and its blending weight share one exponent: alone, one overflows where the other vanishes.
    return -F.logsigmoid(logits) * torch.sigmoid(-right) + torch.exp(F.logsigmoid(right) - logits)


FORMULAS: dict[str, Callable[[Margins], torch.Tensor]] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid_norm,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "exo": exo,
    "nca": nca,
    "bco": bco,
    "sppo": sppo,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
}
# These sort over all pairs of a step.
SORTED = frozenset({"aot", "aot_unpaired"})
