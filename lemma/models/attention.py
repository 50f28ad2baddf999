"""The one attention function of the model, registered with transformers under the name `lemma`.

What it does depends on the arguments of the forward call only: with `segments` it attends within each sequence of a
pack; with `cached` it is an engine's attention over its cache; without either it is transformers' own scaled
dot-product attention, so that `generate` and plain forwards work on the same module. It is pure in the learner:
activation checkpointing may call it twice. With `softcap` (Gemma 2) a score s is cap * tanh(s / cap), in each of these
modes; transformers itself does so in its eager attention only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch._compile import _disable_dynamo
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lemma.core.errors import UserError
from lemma.models.capped_attention import Visible, capped
from lemma.models.flash_attention import flash_kernel
from lemma.models.packing import Segments
from lemma.models.varlen_attention import AttentionSpec, varlen

NAME = "lemma"
# An engine's attention over its cache: layer, query, key, value (T, H, D), cos and sin (T, D) where query and key are
# not rotated yet, scale, window, cap of the scores; gives (T, H, D).
CachedAttention = Callable[..., torch.Tensor]
# Arguments of transformers' attention functions that change the result: sinks.
UNKNOWN_KINDS = ("s_aux",)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, Hq, T, D)
    key: torch.Tensor,  # (1, Hkv, T, D)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    cached: CachedAttention | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output in the layout (1, T, Hq, D) that transformers expects."""
    for name in UNKNOWN_KINDS:
        if kwargs.get(name) is not None:
            raise UserError(
                f"the attention of {type(module).__name__} is of a kind ({name}) that the learner does not compute",
                fix="take a family that docs/engines.md lists",
            )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if cached is not None:
        query_THD, key_THD, value_THD = (x[0].transpose(0, 1) for x in (query, key, value))
        out_THD = cached(module.layer_idx, query_THD, key_THD, value_THD, None, None, scale, sliding_window, softcap)
        return out_THD[None], None
    if segments is None and softcap is not None:
        seen = rows_seen(key.shape[2], query.shape[2], None, key.device)
        visible = seen if attention_mask is None else lambda start, end: attention_mask[..., start:end, :]
        return capped(query, key, value, visible, scale, softcap).transpose(1, 2), None
    if segments is None:
        if sliding_window is not None:
            kwargs["sliding_window"] = sliding_window
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # `squeeze` and not an index: the gradient of an index is a copy into zeros.
    query_THD, key_THD, value_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    spec = AttentionSpec(segments, segments.keys or segments, scale, sliding_window)
    may_flash = getattr(module, "lemma_flash", True)
    if segments.sharing is not None:
        # Where sequences share prompts, keys and values are written out for each; queries are not.
        key_THD, value_THD = segments.sharing.spread(key_THD), segments.sharing.spread(value_THD)
    if has_varlen(query, value, softcap):
        return _by_kernel(query_THD, key_THD, value_THD, spec, may_flash)[None], None
    if segments.sharing is None:
        return _bucketed(query_THD, key_THD, value_THD, spec, softcap)[None], None
    whole = _bucketed(segments.sharing.spread(query_THD), key_THD, value_THD, spec, softcap)
    return segments.sharing.gather(whole)[None], None


def has_varlen(query: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
    """Whether the kernel computes it: on a GPU of 2020 or later in half precision, heads of a usual size, no cap."""
    is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _has_flash(query.device)
    size = query.shape[-1]
    return is_half and softcap is None and size == value.shape[-1] and size <= 256 and size % 8 == 0


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _by_kernel(
    query_THD: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor, spec: AttentionSpec, may_flash: bool
) -> torch.Tensor:
    """The fastest kernel that is there for a pack. Compiled blocks always use torch's kernel."""
    if may_flash and not torch.compiler.is_compiling():
        flash = flash_kernel(query_THD, key_THD, spec.window)
        if flash is not None:
            return flash(query_THD, key_THD, value_THD, spec)
    return varlen(query_THD, key_THD, value_THD, spec)


@_disable_dynamo  # the blocks differ from pack to pack: compiled, each pack would be a graph of its own
def _bucketed(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    spec: AttentionSpec,
    softcap: float | None = None,
) -> torch.Tensor:
    """Exact attention on any device: sequences of similar length as padded blocks. Every sequence has as many queries
    as keys."""
    tokens, heads, _ = query_THD.shape
    out_THD = torch.empty(tokens, heads, value_THD.shape[-1], dtype=query_THD.dtype, device=query_THD.device)
    groups, scale, window = heads // key_THD.shape[1], spec.scale, spec.window
    pieces, places = [], []
    for bucket in spec.keys.buckets:
        query, key, value = (_padded(x, bucket.rows_BL) for x in (query_THD, key_THD, value_THD))
        count = query.shape[2]
        if softcap is None:
            if groups > 1:
                key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            mask = None if window is None else window_mask(count, window, query.device)
            block_BHLD = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale)
        else:
            visible = rows_seen(count, count, window, query.device)
            block_BHLD = capped(query, key, value, visible, scale, softcap)
        pieces.append(block_BHLD.transpose(1, 2).flatten(0, 1)[bucket.take_M])
        places.append(bucket.into_M)
    return out_THD.index_copy(0, torch.cat(places), torch.cat(pieces))


def _padded(x_THD: torch.Tensor, rows_BL: torch.Tensor) -> torch.Tensor:
    """The tokens of a padded block, (B, H, L, D). A CPU copies whole rows many times as fast as it indexes them."""
    if x_THD.device.type != "cpu":
        return x_THD.transpose(0, 1)[:, rows_BL].transpose(0, 1)
    _, heads, size = x_THD.shape
    return x_THD.index_select(0, rows_BL.flatten()).view(*rows_BL.shape, heads, size).transpose(1, 2)


def rows_seen(keys: int, queries: int, window: int | None, device: torch.device) -> Visible:
    """Which of the keys each query sees, the queries being the last of the tokens, for any part of the queries."""
    first = keys - queries
    return lambda start, end: window_mask(keys, window or keys, device, first + start, first + end)


def window_mask(
    length: int, window: int, device: torch.device, first: int = 0, last: int | None = None
) -> torch.Tensor:
    """Causal, and at most `window` tokens back, the token itself included; for the tokens from `first` to `last`."""
    row = torch.arange(first, length if last is None else last, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    return (column <= row) & (column > row - window)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
