"""What a model's configuration and modules tell about its family before anything is computed."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

# Layers with a state whose borders Lemma keeps in a pack (see `lemma.models.blocks`).
KEPT_APART = {"Lfm2ShortConv", "Lfm2MoeShortConv"}
# Kinds of layers, as configurations name them. Sparse, compressed or chunked attention looks like full attention as
# long as sequences are short, so that a probe would not see it.
KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention", "conv", "moe", "mlp", "dense", "sparse"}
STATE_LAYERS = {"linear_attention", "hybrid", "hybrid_sliding", "mamba", "recurrent"}
STATE_FAMILIES = {"rwkv", "xlstm"}


class LogitMap(NamedTuple):
    """How a model makes logits of its head's output (see `lemma.models.logprobs.map_logits`)."""

    scale: float = 1.0
    cap: float | None = None


def logit_map(config: Any) -> LogitMap:
    """As the classes of transformers compute it: Cohere multiplies by `logit_scale`; Granite and MiniCPM 3 divide by
    `logits_scaling`, HyperCLOVA X multiplies by it; Gemma, VaultGemma and nanochat cap."""
    scale, scaling = (_number(config, name) or 1.0 for name in ("logit_scale", "logits_scaling"))
    scale = scale * scaling if config.model_type == "hyperclovax" else scale / scaling
    return LogitMap(scale, _number(config, "final_logit_softcapping"))


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None


def stateful(backbone: nn.Module, config: Any) -> set[str]:
    """The kinds of layers that carry a state from token to token: by their convolution, by the configuration."""
    kinds = {
        type(module).__name__
        for module in backbone.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    }
    return kinds or (_layer_types(config) & STATE_LAYERS) or ({config.model_type} & STATE_FAMILIES)


def unknown_layers(backbone: nn.Module, config: Any) -> str | None:
    """Why a pack of sequences would be computed wrongly, as the layers show, or None."""
    carrying = stateful(backbone, config) - KEPT_APART
    if carrying:
        return (
            f"its layers ({', '.join(sorted(carrying))}) carry a state from token to token, "
            "which would leak from one sequence of a pack into the next"
        )
    if any(getattr(module, "sinks", None) is not None for module in backbone.modules()):
        return "its attention has sinks, which Lemma does not compute"
    unknown = _layer_types(config) - KNOWN_LAYERS
    if unknown:
        return f"its layers are of a kind that Lemma does not compute ({', '.join(sorted(unknown))})"
    return None


def uncached_layers(backbone: nn.Module, config: Any) -> str | None:
    """Why an engine's cache of keys and values does not hold all that the next token needs, or None."""
    carrying = stateful(backbone, config)
    if carrying:
        return (
            f"its layers ({', '.join(sorted(carrying))}) carry a state from token to token, "
            "which the cache of keys and values does not hold"
        )
    if getattr(config, "kv_lora_rank", None):
        return "its attention is latent: keys and values differ in width, and the cache has room for one width"
    return None


def _layer_types(config: Any) -> set[str]:
    return {str(kind) for kind in getattr(config, "layer_types", None) or ()}
