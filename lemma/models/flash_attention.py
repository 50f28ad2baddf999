"""FlashAttention 4 over packs, where it is installed: the learner's attention on Hopper and Blackwell GPUs.

It takes about half the time of torch's kernel for long sequences. Before its first use for a kind of attention it is
tried against torch's, forward and backward; where it fails or differs, a warning says so and torch's stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from lemma.core.errors import warn
from lemma.core.ranks import gather_over_ranks
from lemma.models.packing import Segments
from lemma.models.varlen_attention import AttentionSpec, varlen

# Compute capabilities and head dims it supports. On an H200 it gives wrong results for others, such as 80.
GENERATIONS, SIZES = (9, 10), (64, 128)
# How far it may be from torch's kernel, which rounds in another order: about ten times what was seen in bf16.
LIMIT = 0.03
TRIED_QUERIES, TRIED_KEYS = (130, 5, 64), (130, 25, 64)
# Query, key and value (T, H, D) and an `AttentionSpec`; gives (T, H, D).
PackAttention = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Key under which a kernel is compiled and validated."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    has_window: bool
    deterministic: bool


@dataclass
class FlashState:
    """Whether this process may use it, and whether it was found broken or wrong here."""

    is_allowed: bool = True
    has_failed: bool = False


_state = FlashState()


def agree_on_flash(wanted: bool, say: Callable[[str], None], first_use: Callable[[], None]) -> None:
    """Have all ranks use it, or none: where it is `wanted`, and none of them has found it broken or wrong. The first
    use for each kind of attention tells, so they agree after `first_use`. Compiled blocks always use torch's kernel,
    and scores are computed by the kernel of the update."""
    _state.is_allowed = wanted
    if wanted:
        first_use()
    is_sound = not any(gather_over_ranks(_state.has_failed, "the kernel of attention"))
    _state.is_allowed = wanted and is_sound
    if not is_sound:
        say("FlashAttention 4 does not work on every rank: all use torch's kernel")


def is_flash_allowed() -> bool:
    """Whether this process may use it, where it is there."""
    return _state.is_allowed


def flash_kernel(query_THD: torch.Tensor, key_THD: torch.Tensor, window: int | None) -> PackAttention | None:
    """The kernel for such queries and keys; None where torch's is to be used."""
    if not _state.is_allowed:
        return None
    (_, heads, size), kv_heads = query_THD.shape, key_THD.shape[1]
    deterministic = torch.are_deterministic_algorithms_enabled()
    about = (query_THD.device, query_THD.dtype, heads, kv_heads, size, window is not None, deterministic)
    return _tried_kernel(AttentionKind(*about))


@cache
def _tried_kernel(kind: AttentionKind) -> PackAttention | None:
    if kind.size not in SIZES or not supports(kind.device):
        return None
    function = _installed()
    if function is None:
        return None
    # In a thread of its own: whoever recomputes activations counts what is kept for the backward pass in this one. Such
    # a thread begins on the first GPU, and kernels that are not torch's are launched where their thread is.
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(kind.device,)) as other:
        trouble = other.submit(_mismatch, function, kind).result()
    if trouble is not None:
        _has_failed(f"FlashAttention 4 is installed but not used: it {trouble}")
        return None
    return partial(_attend, function)


def supports(device: torch.device) -> bool:
    """Whether it is for such a GPU."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device)[0] in GENERATIONS


@cache
def _installed() -> Any:
    """Its function; None where it is not there, and with a warning where it is and cannot be imported."""
    try:
        from flash_attn.cute.interface import flash_attn_varlen_func
    except Exception as error:  # noqa: BLE001 (its compiler and shared libraries, whatever they say)
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("flash_attn"):
            return None
        _has_failed(f"flash_attn is installed but cannot be imported ({error})")
        return None
    return flash_attn_varlen_func


def _has_failed(how: str) -> None:
    _state.has_failed = True
    warn(f"{how}; torch's kernel takes its place")


def _attend(
    function: Any, query_THD: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    found = function(
        query_THD,
        key_THD,
        value_THD,
        cu_seqlens_q=spec.queries.borders_B1,
        cu_seqlens_k=spec.keys.borders_B1,
        max_seqlen_q=spec.queries.longest,
        max_seqlen_k=spec.keys.longest,
        softmax_scale=spec.scale,
        causal=spec.window is None,
        window_size=(None, None) if spec.window is None else (spec.window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return found[0] if isinstance(found, tuple) else found


def _mismatch(function: Any, kind: AttentionKind) -> str | None:
    """What is wrong with it, as the end of a sentence: its result or a gradient, or what its compiler says."""
    queries, keys = Segments(TRIED_QUERIES, kind.device), Segments(TRIED_KEYS, kind.device)
    spec = AttentionSpec(queries, keys, kind.size**-0.5, 20 if kind.has_window else None)
    shapes = [(sum(TRIED_QUERIES), kind.heads), *[(sum(TRIED_KEYS), kind.kv_heads)] * 2]
    inputs = [_pseudo_random((*shape, kind.size), kind, phase).requires_grad_() for phase, shape in enumerate(shapes)]
    grad_out = _pseudo_random(inputs[0].shape, kind, 3)
    flash: PackAttention = partial(_attend, function)

    def found(attend: PackAttention) -> list[torch.Tensor]:
        out_THD = attend(*inputs, spec)
        return [out_THD, *torch.autograd.grad(out_THD, inputs, grad_out)]

    wanted = found(varlen)
    try:
        results = found(flash)
        # Another kernel is compiled where no input requires a gradient.
        alone = flash(*(x.detach() for x in inputs), spec)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever a compiler of another version says)
        return f"fails ({(str(error).strip().splitlines() or [type(error).__name__])[0]})"
    off = _largest_gap([*results, alone], [*wanted, wanted[0]])
    return None if off < LIMIT else f"is off by {off:.2g}"


@torch.no_grad()
def _largest_gap(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest relative distance of any of these; NaN where one is."""
    pairs = zip(results, wanted, strict=True)
    return float(torch.stack([(x.float() - y.float()).norm() / y.float().norm() for x, y in pairs]).max())


def _pseudo_random(shape: Sequence[int], kind: AttentionKind, phase: int) -> torch.Tensor:
    """Numbers that look random: nothing is drawn here, so that no draw of the run moves."""
    count = torch.Size(shape).numel()
    ramp = torch.arange(count, device=kind.device, dtype=torch.float64) * 12.9898 + phase
    return (torch.sin(ramp * ramp) * 1.5).view(*shape).to(kind.dtype)
