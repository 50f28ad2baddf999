"""Which optimiser of torch or bitsandbytes steps the master weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lemma.core.errors import UserError
from lemma.learning.learning_options import OptimOptions
from lemma.learning.parameter_pieces import ParameterPiece


def make_inner(values: Mapping[ParameterPiece, torch.Tensor], options: OptimOptions) -> torch.optim.Optimizer | None:
    """Weight decay acts on matrices only. None where there is nothing to update."""
    groups = [
        {"params": [v for piece, v in values.items() if piece.decays], "weight_decay": options.weight_decay},
        {"params": [v for piece, v in values.items() if not piece.decays], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    if not filled:
        return None
    if options.name == "rmsprop":
        return torch.optim.RMSprop(filled, lr=options.lr, alpha=options.smoothing, eps=options.eps)
    settings: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "eps": options.eps}
    if options.name == "adamw":
        return torch.optim.AdamW(filled, fused=True, **settings)
    try:
        import bitsandbytes
    except ImportError as error:
        fix = "install it with `.venv/bin/pip install -e '.[quant]'`, or write `name: adamw`"
        raise UserError("optim.name: adamw_8bit needs bitsandbytes", fix=fix) from error
    return bitsandbytes.optim.AdamW8bit(filled, **settings)
