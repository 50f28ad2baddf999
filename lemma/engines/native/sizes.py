"""How large the native engine's cache and its passes are."""

from __future__ import annotations

import math

import torch

from lemma.engines.native.cached_attention import Cache
from lemma.models.memory import PREFILL_BYTES
from lemma.models.policy import Policy

# Prompt tokens of one pass.
LEAST_PREFILL, MOST_PREFILL = 2048, 16384
# Share of the free GPU memory that the KV cache takes by default.
CACHE_SHARE = 0.5
CPU_CACHE_TOKENS = 65536


def layout(policy: Policy) -> tuple[int, int, int]:
    """Layers, key-value heads and head size."""
    config = policy.causal.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or config.num_attention_heads, dim


def default_prefill(policy: Policy) -> int:
    """Prompt tokens per pass: enough to keep a GPU busy, few enough that the widest tensors of a layer stay small."""
    config = policy.causal.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest = (3 * inner + 6 * config.hidden_size) * policy.head.weight.element_size()
    return max(LEAST_PREFILL, min(MOST_PREFILL, int(PREFILL_BYTES) // widest))


def most_gathered(policy: Policy) -> int:
    """Tokens, cached and new, whose keys and values attention may gather in one pass, counted once per sequence: those
    of one layer fit into the memory of a pass."""
    _, heads, dim = layout(policy)
    return int(PREFILL_BYTES) // (2 * heads * dim * policy.head.weight.element_size())


def default_tokens(policy: Policy, rows: int) -> int:
    """Tokens of the cache where nobody says how many: for so many sequences, or what a share of the memory holds."""
    device = policy.device
    if device.type != "cuda":
        return min(CPU_CACHE_TOKENS, rows * policy.context)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return min(int(CACHE_SHARE * free / bytes_per_token(policy)), rows * policy.context)


def make_cache(policy: Policy, tokens: int, block: int) -> Cache:
    layers, heads, dim = layout(policy)
    # One block more than sequences can own: padding rows write to it.
    return Cache(layers, math.ceil(tokens / block) + 1, block, heads, dim, policy.dtype, policy.device)


def bytes_per_token(policy: Policy) -> int:
    """Bytes of the cache per token."""
    layers, heads, dim = layout(policy)
    return 2 * layers * heads * dim * policy.head.weight.element_size()
