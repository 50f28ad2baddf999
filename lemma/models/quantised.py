"""Frozen base weights in few bits, by bitsandbytes: nf4, or 8-bit integers with a scale for each row.

An engine and the learner compute the same with them. LLM.int8's own product would not do: it rounds activations to 8
bits where nothing is learnt, but on a CPU not where something is, and on a GPU an outlier of one sequence changes how
all sequences of the pass are computed. Here weights alone are rounded; a product is made in the compute precision.

Shapes: T tokens, I width of the input, O of the output.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from lemma.core.errors import UserError
from lemma.models.model_options import Quantize

WORDS: dict[Quantize, str] = {"4bit": "4 bits", "8bit": "8 bits"}


def quantising(kind: Quantize, compute: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What transformers is told to hold the weights of linear layers but the head so."""
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        fix = "install it with `.venv/bin/pip install -e '.[quant]'`"
        raise UserError("model.quantize needs bitsandbytes", fix=fix) from error
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": compute}
    settings = (
        BitsAndBytesConfig(load_in_4bit=True, **four) if kind == "4bit" else BitsAndBytesConfig(load_in_8bit=True)
    )
    return {"quantization_config": settings, "device_map": {"": str(device)}}


def compute_in_one_way(model: Any) -> None:
    """Let quantised layers compute alike wherever something is learnt and where nothing is.

    On some kinds of CPU bitsandbytes packs 4-bit weights anew wherever nothing is learnt, for a kernel that rounds to
    bf16 whatever it is asked for: an engine would differ from the learner.
    """
    from bitsandbytes.nn import Linear8bitLt

    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        if type(module) is Linear8bitLt:
            module.__class__ = _eight_bit_layer()


class EightBitProduct(torch.autograd.Function):
    """x @ weight.T + bias for a frozen weight whose dense form is made for the forward pass and again for the backward
    pass, and is not kept."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: torch.Tensor, codes_OI: torch.Tensor, largest_O: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.frozen = codes_OI, largest_O
        return F.linear(x_TI, dense(codes_OI, largest_O, x_TI.dtype), bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        codes_OI, largest_O = ctx.frozen
        return grads[0] @ dense(codes_OI, largest_O, grads[0].dtype), None, None, None


def dense(codes_OI: torch.Tensor, largest_O: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight that codes from -127 to 127 and the largest size of each row stand for, rounded once."""
    return codes_OI.to(dtype).mul_(largest_O[:, None] * (1.0 / 127.0))


@cache
def _eight_bit_layer() -> type:
    from bitsandbytes.nn import Linear8bitLt

    class EightBitLinear(Linear8bitLt):
        """A layer that peft knows as bitsandbytes' own, with a product of its own."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            largest_O = self.state.SCB if self.weight.SCB is None else self.weight.SCB
            bias_O = None if self.bias is None else self.bias.to(x.dtype)
            return EightBitProduct.apply(x, self.weight.data, largest_O, bias_O)

    return EightBitLinear
