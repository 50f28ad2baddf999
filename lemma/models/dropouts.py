"""Where a model drops numbers by chance: in modules of torch, and in functions that its layers call themselves."""

from __future__ import annotations

from torch import nn

# Probabilities that layers of transformers hand to torch's function (Seed-OSS, StarCoder 2). Those of attention are not
# among them: Lemma's attention has no dropout.
HELD = ("residual_dropout", "embedding_dropout", "hidden_dropout", "activation_dropout", "dropout")


def dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every module that drops something in training, and the name of its probability."""
    names = [(module, "p") for module in model.modules() if isinstance(module, nn.Dropout)]
    names += [(module, name) for module in model.modules() for name in HELD if name in vars(module)]
    return [(module, name) for module, name in names if _is_probability(getattr(module, name))]


def _is_probability(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def switch_off(model: nn.Module) -> int:
    """Set the probability of every dropout to 0; how many there were."""
    found = dropouts(model)
    for module, name in found:
        setattr(module, name, 0.0)
    return len(found)
