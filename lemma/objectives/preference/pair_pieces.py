"""What the preference losses share: log-probabilities of responses, the two sides of a pair, the NLL of the chosen one.

A sequence is a prompt with one response. It carries:

- `fields["sign"]`: +1 where the response is liked, -1 where it is not;
- `tokens["reference"]`: log-probabilities under the reference model, where the loss has one;
- `tokens["response"]`: 1 in the response, 0 in a prompt that is learnt as well; absent where only responses are;
- `tokens["nll"]`: the weight of a token in the NLL of liked responses, 1 over their number in the whole step.

Shapes: N trained tokens, B sequences, U pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from lemma.objectives.objective import LossInputs, Ratio


def response_N(terms: LossInputs) -> torch.Tensor:
    """1 for the tokens that belong to a response."""
    given = terms.tokens.get("response")
    return torch.ones_like(terms.logprobs_N) if given is None else given


def response_lengths(terms: LossInputs) -> torch.Tensor:
    """Tokens of each response, at least 1 to avoid dividing by zero."""
    return terms.per_sequence(response_N(terms)).clamp(min=1)


def sequence_logprobs(terms: LossInputs, *, average: bool = False) -> torch.Tensor:
    """Log-probability (B,) of each response, the sum over its tokens or their mean."""
    sums_B = terms.per_sequence(terms.logprobs_N * response_N(terms))
    return sums_B / response_lengths(terms) if average else sums_B


def reference_logprobs(terms: LossInputs) -> torch.Tensor:
    """The same sums under the reference model; 0 where there is none."""
    given = terms.tokens.get("reference")
    if given is None:
        return torch.zeros_like(terms.fields["sign"])
    return terms.per_sequence(given * response_N(terms))


@dataclass(frozen=True)
class Sides:
    """Tells the two sequences of each pair apart. A sequence without a partner counts as 0 on the other side."""

    terms: LossInputs

    @cached_property
    def place_B(self) -> torch.Tensor:
        """The pair of each sequence, numbered from 0."""
        return torch.unique(self.terms.group_B, return_inverse=True)[1]

    @cached_property
    def count(self) -> int:
        return int(self.place_B.max()) + 1 if len(self.place_B) else 0

    def split(self, values_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A number per sequence as two numbers per pair: of the chosen and of the rejected response."""
        chosen_B = self.terms.fields["sign"] > 0
        return self._sum(torch.where(chosen_B, values_B, 0.0)), self._sum(torch.where(chosen_B, 0.0, values_B))

    def _sum(self, values_B: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.count, dtype=values_B.dtype, device=values_B.device).index_add(
            0, self.place_B, values_B
        )


def negative_log_likelihood(terms: LossInputs) -> torch.Tensor:
    """Mean NLL of what `tokens["nll"]` marks; packs sum to the mean of the step. 0 if nothing is marked."""
    weight_N = terms.tokens.get("nll")
    return terms.logprobs_N.sum() * 0.0 if weight_N is None else -(terms.logprobs_N * weight_N).sum()


def pair_metrics(
    chosen_rewards_U: torch.Tensor,
    rejected_rewards_U: torch.Tensor,
    chosen_logps_U: torch.Tensor,
    rejected_logps_U: torch.Tensor,
) -> dict[str, Ratio]:
    """Means over pairs: rewards of both sides, their difference, how often the chosen one wins, and
    log-probabilities."""
    chosen, rejected = chosen_rewards_U.detach(), rejected_rewards_U.detach()
    count = float(len(chosen))
    return {
        "rewards/chosen": (chosen.sum(), count),
        "rewards/rejected": (rejected.sum(), count),
        "rewards/margins": ((chosen - rejected).sum(), count),
        "rewards/accuracies": ((chosen > rejected).to(chosen.dtype).sum(), count),
        "logps/chosen": (chosen_logps_U.detach().sum(), count),
        "logps/rejected": (rejected_logps_U.detach().sum(), count),
    }


def nll_metric(terms: LossInputs) -> dict[str, Ratio]:
    """Mean NLL per token of what the NLL term imitates, if there is one."""
    if "nll" not in terms.tokens:
        return {}
    marked_N = (terms.tokens["nll"] > 0).to(terms.logprobs_N.dtype)
    return {"nll": (-(terms.logprobs_N.detach() * marked_N).sum(), marked_N.sum())}


def distance_metric(terms: LossInputs) -> dict[str, Ratio]:
    """How far the policy is from the reference on the responses of the data: the mean over tokens of r - 1 - log r.

    r is the ratio of the two probabilities. Never negative, and 0 where both agree. If the responses were sampled from
    the reference, it estimates KL(reference || policy) per token.
    """
    if "reference" not in terms.tokens:
        return {}
    mask_N = response_N(terms)
    difference_N = ((terms.logprobs_N.detach() - terms.tokens["reference"]) * mask_N).clamp(max=80.0)
    return {"kl": ((torch.expm1(difference_N) - difference_N).sum(), mask_N.sum())}
