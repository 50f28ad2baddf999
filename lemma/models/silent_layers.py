"""Decoder layers that keep the arguments of a call for themselves, and the convolution that one of their parts is."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lemma.models.attention import CachedAttention
from lemma.models.packing import Segments

# Their names, and the part of each that needs to know of the pack.
SILENT = {
    "StableLmDecoderLayer": "self_attn",
    "NemotronDecoderLayer": "self_attn",
    "Lfm2DecoderLayer": "conv",
    "Lfm2MoeDecoderLayer": "conv",
}


def telling_forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The class's own forward, in which one part of the layer gets what the layer does not hand on."""
    part = getattr(self, SILENT[type(self).__name__])
    forward = _convolved if hasattr(part, "conv") else type(part).forward
    part.forward = partial(forward, part, segments=kwargs.get("segments"), cached=kwargs.get("cached"))
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        del part.forward


def _convolved(
    self: nn.Module,
    hidden_states: torch.Tensor,
    segments: Segments | None = None,
    cached: CachedAttention | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The short convolution of LFM2 on a pack (1, T, hidden), within each sequence. Other calls are the class's own."""
    if segments is None:
        assert cached is None, "an engine's cache holds no state of convolutions"
        return type(self).forward(self, hidden_states, **kwargs)
    before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
    inner = before * x
    wide = inner if inner.dtype == torch.float64 else inner.float()
    borders = segments.borders_B1.long()
    tokens = hidden_states.shape[1]
    place_T = torch.arange(tokens, device=wide.device)
    place_T = place_T - torch.repeat_interleave(borders[:-1], borders.diff(), output_size=tokens)
    weight_HK = self.conv.weight[:, 0].to(wide.dtype)
    total = wide * weight_HK[:, -1]
    for back in range(1, min(weight_HK.shape[1], tokens)):
        earlier = F.pad(wide[:, :-back], (0, 0, back, 0)) * weight_HK[:, -1 - back]
        total = total + earlier.where((place_T >= back)[:, None], 0.0)
    if self.conv.bias is not None:
        total = total + self.conv.bias.to(wide.dtype)
    return self.out_proj(after * total.to(inner.dtype))
