"""How vLLM is started: engine arguments and environment variables, the same in every mode."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lemma.engines.remote.server_client import IDLE_SECONDS, SERVED
from lemma.engines.remote.server_process import own_environment
from lemma.engines.vllm.vllm_options import VllmOptions
from lemma.engines.vllm.weights import NAMES, adapter_rank
from lemma.models.policy import Policy

WORKER = "lemma.engines.vllm.vllm_worker"
GIB = 2**30


def engine_arguments(policy: Policy, options: VllmOptions, context: int, seed: int, folder: Path) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs; the server takes them as options of the same names."""
    rank = adapter_rank(policy) if policy.is_adapter else 0
    on_cpu = policy.device.type == "cpu"
    return plain_arguments(str(folder), NAMES[policy.dtype], options, context, seed, rank, on_cpu)


def plain_arguments(
    model: str, dtype: str, options: VllmOptions, context: int | None, seed: int, adapter: int, on_cpu: bool
) -> dict[str, Any]:
    """The same without a policy. `adapter` is the maximum rank of an adapter; 0 if there is none."""
    cache_gib = options.cache_gib or (1.0 if on_cpu else None)
    wanted: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_num_seqs": options.sequences,
        "seed": seed % 2**31,
        "enforce_eager": options.eager or on_cpu,
        "gpu_memory_utilization": options.memory,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [f"{WORKER}:CutLogits"],
        "worker_extension_cls": f"{WORKER}.Extension",
    }
    if context is not None:
        wanted["max_model_len"] = context
    if cache_gib is not None:
        wanted["kv_cache_memory_bytes"] = int(cache_gib * GIB)
    if adapter:
        wanted |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter}
    if options.sleep and not on_cpu:
        wanted["enable_sleep_mode"] = True
    return wanted


def environment(on_cpu: bool) -> dict[str, str]:
    """Variables that vLLM reads. Lemma's logits processor is written for vLLM's first model runner."""
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return variables | ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if on_cpu else {})


def server_environment(wanted: Mapping[str, str], temporary: Path) -> dict[str, str]:
    """All variables of a server's process. vLLM never removes its temporary files, so they get their own folder."""
    return {
        **own_environment(),
        **wanted,
        "TMPDIR": str(temporary),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(10 * IDLE_SECONDS),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    }


def server_command(arguments: Mapping[str, Any], host: str, port: int) -> list[str]:
    """The command line of vLLM's server behind Lemma's guard, with these engine arguments as its options."""
    options = [sys.executable, "-m", "lemma.engines.remote.run_module", "vllm.entrypoints.openai.api_server"]
    options += [
        "--host",
        host,
        "--port",
        str(port),
        "--served-model-name",
        SERVED,
        "--middleware",
        "lemma.engines.remote.server_guard.Guard",
        "--disable-uvicorn-access-log",
    ]
    for name, value in arguments.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            options += [f"--{dashed}", *(value if isinstance(value, list) else [str(value)])]
    return options
