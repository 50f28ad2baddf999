"""How vLLM is started: arguments of the engine and variables of the environment, the same in both modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lemma.engines.vllm.vllm_options import VllmOptions
from lemma.engines.vllm.weights import NAMES, adapter_rank, dtype_of
from lemma.models.policy import Policy

WORKER = "lemma.engines.vllm.vllm_worker"
GIB = 2**30


def engine_arguments(policy: Policy, options: VllmOptions, context: int, seed: int, folder: Path) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs; the server takes them as options of the same names."""
    on_cpu = policy.device.type == "cpu"
    cache_gib = options.cache_gib or (1.0 if on_cpu else None)
    wanted: dict[str, Any] = {
        "model": str(folder),
        "dtype": NAMES[dtype_of(policy)],
        "max_model_len": context,
        "max_num_seqs": options.sequences,
        "seed": seed % 2**31,
        "enforce_eager": options.eager or on_cpu,
        "gpu_memory_utilization": options.memory,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [f"{WORKER}:Cuts"],
        "worker_extension_cls": f"{WORKER}.Extension",
    }
    if cache_gib is not None:
        wanted["kv_cache_memory_bytes"] = int(cache_gib * GIB)
    if policy.is_adapter:
        wanted |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter_rank(policy)}
    if options.sleep and not on_cpu:
        wanted["enable_sleep_mode"] = True
    return wanted


def environment(policy: Policy) -> dict[str, str]:
    """Variables that vLLM reads. Lemma's logits processor is written for its first model runner."""
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if policy.device.type == "cpu":
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables
