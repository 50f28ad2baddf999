"""The policy's weights in the form that vLLM reads: Hugging Face names, adapters separate."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch

from lemma.engines.protocol import EngineError
from lemma.engines.remote.weight_files import whole_as, write_buckets
from lemma.engines.vllm.vllm_options import head_refusal
from lemma.models.policy import Policy

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # maximum LoRA ranks that vLLM supports


def check_policy(policy: Policy) -> None:
    if getattr(policy.causal, "is_quantized", False):
        raise EngineError("vLLM cannot take over a quantised model", fix="write `engine: native` or leave out quantize")
    if policy.is_adapter and any(config.use_dora for config in policy.peft.peft_config.values()):
        raise EngineError(
            "vLLM cannot run DoRA adapters", fix="write `engine: native`, or `dora: false` under model.lora"
        )
    if policy.is_adapter and any(config.modules_to_save for config in policy.peft.peft_config.values()):
        raise EngineError(
            "vLLM cannot run adapters with layers that are trained whole",
            fix="write `engine: native`, or remove `modules_to_save` from model.lora",
        )
    if policy.dtype not in NAMES:
        raise EngineError(f"vLLM cannot run weights of type {policy.dtype}", fix="write `precision: bf16`")
    config = policy.causal.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    refusal = head_refusal(head) if policy.device.type == "cpu" else None
    if refusal is not None:
        raise EngineError(refusal, fix="write `engine: native`")


def base_state(policy: Policy) -> dict[str, torch.Tensor]:
    """The weights without the adapter; a head tied to the embedding is left out."""
    state = {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in policy.causal.state_dict().items()
        if ".lora_" not in name
    }
    if policy.head.weight is policy.causal.get_input_embeddings().weight:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("lm_head.")}
    return state


def write_model(policy: Policy, folder: Path, keep: bool = True) -> None:
    """A folder that vLLM can start from."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(policy.causal.config)
    config.architectures = [type(policy.causal).__name__]
    config.dtype = policy.dtype
    if keep:
        config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    write_weights(policy, folder, keep)


def write_weights(policy: Policy, folder: Path, keep: bool = True) -> None:
    """Replace the weights in the folder; if they are sharded, all ranks call this together, and those with `keep`
    write."""
    files = write_buckets(base_state(policy), policy.dtype, folder, keep)
    if keep and len(set(files.values())) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_adapter(policy: Policy, folder: Path) -> None:
    """Write the adapter as peft saves it; if it is sharded, all ranks call this together."""
    state = None
    if policy.is_split:
        own = {name: tensor for name, tensor in policy.module.state_dict().items() if ".lora_" in name}
        state = {name: whole_as(tensor, policy.dtype).cpu() for name, tensor in own.items()}
    policy.peft.save_pretrained(folder, state_dict=state)


def adapter_rank(policy: Policy) -> int:
    """The smallest rank that vLLM supports and the adapters fit into."""
    rank = max(config.r for config in policy.peft.peft_config.values())
    if rank > RANKS[-1]:
        raise EngineError(f"vLLM takes no adapters of rank {rank}", fix=f"write {RANKS[-1]} or less")
    return min(r for r in RANKS if r >= rank)
