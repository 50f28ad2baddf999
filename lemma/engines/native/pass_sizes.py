"""Limits of one prefill pass: new tokens, and cached tokens that they attend to."""

from __future__ import annotations

from lemma.models.memory import PREFILL_BYTES
from lemma.models.policy import Policy

LEAST_PREFILL, MOST_PREFILL = 2048, 16384


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
