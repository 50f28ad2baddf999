"""How fast a step was: tokens per second, and on GPUs the share of the matrix rate (MFU) and the peak of memory."""

from __future__ import annotations

import torch

from lemma.models.gpus import GPUS
from lemma.models.policy import Policy

# Dense bf16 matrix rate in FLOP/s, by a part of the device's name.
MATRIX_RATES = {gpu.device: gpu.matrix_rate for gpu in GPUS.values()}


def throughput(policy: Policy, tokens: int, seconds: float) -> dict[str, float]:
    """6 FLOP per parameter and token for an update; recomputation does not count as work. Where nothing was learnt, as
    when all groups are dead, there is no rate."""
    rates = {"tokens_per_second": tokens / seconds} if tokens and seconds else {}
    if policy.device.type != "cuda":
        return rates
    device_name = torch.cuda.get_device_name(policy.device)
    rate = next((value for part, value in MATRIX_RATES.items() if part in device_name), None)
    if rate is not None and rates:
        parameters = sum(p.numel() for p in policy.causal.parameters())
        rates["mfu"] = 6.0 * parameters * tokens / seconds / rate
    rates["peak_memory_gib"] = torch.cuda.max_memory_allocated(policy.device) / 2**30
    return rates
