"""Tiny random models of many families, and what is known of each."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lemma.models import installing
from lemma.models.attention import NAME
from lemma.models.policy import Policy
from tests.engines.small_policies import small_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "initializer_range": 0.3,
}
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
# Windows shorter than the sequences of the tests, in one layer of two where a family can have both.
BOTH = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
QWEN = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "num_key_value_heads": 4, "head_dim": None}  # fmt: skip
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}
# Values that a configuration computes itself or does not know.
ALL_HEADS = {"num_key_value_heads": None, "head_dim": None}
CONVOLUTION = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}

# Learner and native engine take these.
TAKEN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": QWEN,
    "qwen3": QWEN,
    "qwen3_moe": MIXTURE,
    "mistral": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8, **MIXTURE},
    "ministral": BOTH,
    "olmo2": {},
    "olmo3": BOTH,
    "phi": {},
    "phi3": {"sliding_window": 8},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granitemoe": {"logits_scaling": 0.5, **MIXTURE},
    "starcoder2": {"sliding_window": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm": {},
    "glm4": {},
    "gemma": {},
    "gemma2": {**BOTH, **CAPS},
    "gemma3_text": BOTH,
    "vaultgemma": {**BOTH, **CAPS},
    "exaone4": BOTH,
    "ernie4_5": {},
    "seed_oss": {},
    "helium": {},
    "apertus": {},
    "hunyuan_v1_dense": {},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, **BOTH},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "nemotron": {},
    "nanochat": {"final_logit_softcapping": 2.0},
    "hyperclovax": {"logits_scaling": 0.3},
    "gpt2": ALL_HEADS,
    "gpt_neox": ALL_HEADS,
    "lfm2": {},
}

# The learner takes these; the native engine gives this reason.
STATE, LATENT_REASON = "carry a state from token to token, which the cache", "its attention is latent"
LEARNER_ONLY: dict[str, tuple[dict[str, Any], str]] = {
    "lfm2": (CONVOLUTION, STATE),
    "lfm2_moe": ({**CONVOLUTION, "num_dense_layers": 1, **MIXTURE}, STATE),
    "minicpm3": ({**LATENT, "dim_model_base": 16}, LATENT_REASON),
    "deepseek_v3": ({**LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **MIXTURE}, LATENT_REASON),
}

# Neither takes these.
LEAK = "carry a state from token to token, which would leak"
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_d_state": 8, "mamba_n_groups": 1}
HYBRID = ["linear_attention", "full_attention"]
ZAMBA = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "n_mamba_heads": 2,
         "mamba_d_state": 8, "head_dim": None, "attention_head_dim": 32}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": ({"layer_types": HYBRID, **LINEAR, **MIXTURE}, LEAK),
    "falcon_h1": ({**MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, LEAK),
    "bamba": ({**MAMBA, "mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]}, LEAK),
    "granitemoehybrid": ({**MAMBA, "mamba_n_heads": 8, "mamba_d_head": 16, "layer_types": HYBRID, **MIXTURE}, LEAK),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}, LEAK),
    "zamba": (ZAMBA, LEAK),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"], "lru_width": 64}, LEAK),
    "mamba": ({"state_size": 8}, LEAK),
    "mamba2": ({"state_size": 8, "num_heads": 8, "n_groups": 1}, LEAK),
    "minimax": ({"layer_types": HYBRID, "block_size": 16, **MIXTURE}, LEAK),
    "rwkv": ({"attention_hidden_size": 64}, LEAK),
    "gpt_oss": ({"layer_types": BOTH["layer_types"], **MIXTURE}, "its attention has sinks"),
    "llama4_text": ({"attention_chunk_size": 16, "intermediate_size_mlp": 64, **MIXTURE}, "chunked_attention"),
    "deepseek_v32": ({**LATENT, "n_routed_experts": 4, "index_topk": 8, **MIXTURE}, "deepseek_sparse_attention"),
    "doge": ({}, "it begins in layers.0.self_attn"),
    "bloom": (ALL_HEADS, "it does not take packed sequences"),
}


def plain_model(kind: str, values: dict[str, Any], attention: str = "eager") -> Any:
    """The model as transformers makes it, with weights that depend on its configuration only. Norms and biases are not
    1 and 0, so that each of them counts."""
    wanted = {name: value for name, value in {**SIZES, **values}.items() if value is not None}
    config = AutoConfig.for_model(kind, **wanted)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def family_policy(kind: str, values: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Policy:
    """The same model as Lemma loads it."""
    model = plain_model(kind, values, NAME).to(device)
    for parameter in model.parameters():  # weights only: the frequencies of the rotary embedding stay in float32
        parameter.data = parameter.data.to(dtype)
    installing.install(model)
    return Policy(model, small_tokenizer())
