"""The pair losses of DPO, and what each can be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lemma.config.options import refuse_unused

if TYPE_CHECKING:
    from lemma.algorithms.preference.dpo import Dpo

LossName = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo",
    "nca",
    "bco",
    "sppo",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
]
SMOOTHED = {"sigmoid", "sigmoid_norm", "robust", "exo", "aot", "aot_unpaired"}
# Losses of the difference between the two scores; only these are defined for other divergences.
OF_DIFFERENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo", "discopop"}
# Losses on sorted values: what is compared at a rank may come from different pairs.
OF_RANKS = {"aot", "aot_unpaired"}


def check_losses(options: Dpo) -> None:
    """Refuse options that have no effect on the chosen losses."""
    names = ", ".join(options.losses)
    if not options.losses:
        raise ValueError("loss names no loss; write for example `loss: sigmoid`")
    if options.label_smoothing and not SMOOTHED & options.losses.keys():
        raise ValueError(f"label_smoothing has no effect on {names}; remove it or write `loss: sigmoid`")
    if options.divergence != "reverse_kl" and options.losses.keys() - OF_DIFFERENCE:
        raise ValueError(f"divergence: {options.divergence} is not defined for {names}; write `loss: sigmoid`")
    if options.reference_free and options.divergence != "reverse_kl":
        raise ValueError("without a reference there is no divergence; remove divergence or reference_free")
    if options.weighting and OF_RANKS & options.losses.keys():
        sorts = ", ".join(name for name in options.losses if name in OF_RANKS)
        raise ValueError(f"{sorts} sorts the pairs, so a weight has no pair; remove weighting or write another loss")
    if options.divergence != "alpha":
        refuse_unused(options, ("divergence_alpha",), f"on {options.divergence}", "write `divergence: alpha`")
    for option, loss in (("tau", "discopop"), ("shift", "bco")):
        if loss not in options.losses:
            refuse_unused(options, (option,), f"on {names}", f"write `loss: {loss}`")
