"""How fast a step was: tokens per second, and on GPUs the share of the matrix rate (MFU) and the peak of memory."""

from __future__ import annotations

import torch

from lemma.models.policy import Policy

# Dense bf16 matrix rate by the vendor's data sheet, in FLOP/s, by a part of the device's name.
MATRIX_RATES = {
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}


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
