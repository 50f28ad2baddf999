"""The one attention function of the model, registered with transformers under the name `lemma`.

What it does depends on the arguments of the forward call only: with `segments` it attends within each sequence of a
pack; with `cached` it is an engine's attention over its cache; without either it is transformers' own scaled
dot-product attention, so that `generate` and plain forwards work on the same module. It is pure in the learner:
activation checkpointing may call it twice. With `softcap` (Gemma 2) a score s is cap * tanh(s / cap), in each of these
modes; transformers itself does so in its eager attention only.
"""

from __future__ import annotations

import inspect
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
from lemma.models.sharing import Sharing

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
    query_HTD, key_HTD, value_HTD = (x.squeeze(0) for x in (query, key, value))
    sharing, keys = segments.sharing, segments.keys
    may_flash = getattr(module, "lemma_flash", True)
    if sharing is not None and keys is not None:
        shared = (segments, sharing, keys, scale, sliding_window, softcap, may_flash)
        out_THD = _attend_shared(query_HTD, key_HTD, value_HTD, *shared)
    elif has_varlen(query, value, softcap):
        out_THD = _by_kernel(query_HTD, key_HTD, value_HTD, segments, segments, scale, sliding_window, may_flash)
    else:
        out_THD = _bucketed(query_HTD, key_HTD, value_HTD, segments, scale, sliding_window, softcap)
    return out_THD[None], None


def _attend_shared(
    query_HTD: torch.Tensor,
    key_HTD: torch.Tensor,
    value_HTD: torch.Tensor,
    segments: Segments,
    sharing: Sharing,
    keys: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
    may_flash: bool,
) -> torch.Tensor:
    """Attention where sequences share prompts: keys and values are written out for each, queries are not."""
    key_HKD, value_HKD = (sharing.spread(x.transpose(0, 1)).transpose(0, 1) for x in (key_HTD, value_HTD))
    if has_varlen(query_HTD, value_HTD, softcap):
        return _by_kernel(query_HTD, key_HKD, value_HKD, segments, keys, scale, window, may_flash)
    query_HKD = sharing.spread(query_HTD.transpose(0, 1)).transpose(0, 1)
    return sharing.gather(_bucketed(query_HKD, key_HKD, value_HKD, keys, scale, window, softcap))


def has_varlen(query: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
    """Whether torch's variable-length kernel computes it: on a GPU of 2020 or later in half precision, heads of a usual
    size, no cap."""
    is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _has_flash(query.device)
    size = query.shape[-1]
    return is_half and softcap is None and size == value.shape[-1] and size <= 256 and size % 8 == 0


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _by_kernel(
    query_HTD: torch.Tensor,
    key_HTD: torch.Tensor,
    value_HTD: torch.Tensor,
    segments: Segments,
    keys: Segments,
    scale: float,
    window: int | None,
    may_flash: bool,
) -> torch.Tensor:
    """The fastest kernel that is there for a pack. A compiled block has torch's."""
    query_THD, key_THD, value_THD = (x.transpose(0, 1) for x in (query_HTD, key_HTD, value_HTD))
    flash = flash_kernel(query_THD, key_THD, window) if may_flash and not torch.compiler.is_compiling() else None
    if flash is not None:
        return flash(query_THD, key_THD, value_THD, segments, keys, scale, window)
    return varlen(query_HTD, key_HTD, value_HTD, segments, scale, window, keys)


def varlen(
    query_HTD: torch.Tensor,
    key_HTD: torch.Tensor,
    value_HTD: torch.Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
    key_segments: Segments | None = None,
) -> torch.Tensor:
    """torch's variable-length kernel; the window counts tokens to the left, the token itself not included.

    Where a sequence has more keys than queries (`key_segments`), the queries are its last tokens.
    """
    from torch.nn.attention.varlen import varlen_attn

    keys = key_segments or segments
    return varlen_attn(
        query_HTD.transpose(0, 1),
        key_HTD.transpose(0, 1),
        value_HTD.transpose(0, 1),
        segments.borders_B1,
        keys.borders_B1,
        segments.longest,
        keys.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **_gqa_argument(query_HTD.shape[0] != key_HTD.shape[0]),
    )


@cache
def _varlen_wants_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _gqa_argument(grouped: bool) -> dict[str, bool]:
    return {"enable_gqa": grouped} if _varlen_wants_gqa() else {}


@_disable_dynamo  # the blocks differ from pack to pack: compiled, each pack would be a graph of its own
def _bucketed(
    query_HTD: torch.Tensor,
    key_HTD: torch.Tensor,
    value_HTD: torch.Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Exact attention on any device: sequences of similar length as padded blocks."""
    heads, tokens, _ = query_HTD.shape
    out_THD = torch.empty(tokens, heads, value_HTD.shape[-1], dtype=query_HTD.dtype, device=query_HTD.device)
    groups = heads // key_HTD.shape[0]
    pieces, places = [], []
    for bucket in segments.buckets:
        query, key, value = (_padded(x, bucket.rows_BL) for x in (query_HTD, key_HTD, value_HTD))
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


def _padded(x_HTD: torch.Tensor, rows_BL: torch.Tensor) -> torch.Tensor:
    """The tokens of a padded block, (B, H, L, D). A CPU copies whole rows many times as fast as it indexes them."""
    if x_HTD.device.type != "cpu":
        return x_HTD[:, rows_BL].transpose(0, 1)
    heads, _, size = x_HTD.shape
    return x_HTD.transpose(0, 1).index_select(0, rows_BL.flatten()).view(*rows_BL.shape, heads, size).transpose(1, 2)


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
