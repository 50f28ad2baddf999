"""What a stage's time goes to, and what it does in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lemma.core import outside
from lemma.core.ranks import note_place
from lemma.learning.learner import StepReport
from lemma.models.update_flops import MATRIX_RATES


@dataclass
class Clock:
    """Time spent since the last reading, by name, how many tokens were trained on and sampled in it, and the arithmetic
    of its updates. The parts of a step begin here, in the process that trains."""

    spent: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    sampled: int = 0
    flops: float = 0.0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        if outside.is_fork:
            outside.end_fork()
        begin = time.perf_counter()
        note_place(name)
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin

    def add(self, report: StepReport) -> None:
        """Count the work of an update."""
        self.tokens += report.tokens
        self.flops += report.flops

    def add_server_seconds(self, seconds: float) -> None:
        self.spent["server"] = self.spent.get("server", 0.0) + seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move this much time from one part to another."""
        self.spent[source] = self.spent.get(source, 0.0) - seconds
        self.spent[target] = self.spent.get(target, 0.0) + seconds

    def read(self, device: torch.device) -> dict[str, float]:
        """Seconds of each part and in total since the last reading, and the rates of updates on this device and of
        sampling; resets to zero."""
        now = time.perf_counter()
        result = {"seconds": now - self.started, **{f"{name}_seconds": value for name, value in self.spent.items()}}
        result |= throughput(device, self.tokens, result.get("update_seconds", 0.0), self.flops)
        if self.sampled and result.get("generate_seconds"):
            result["generated_per_second"] = self.sampled / result["generate_seconds"]
        self.spent, self.started, self.tokens, self.sampled, self.flops = {}, now, 0, 0, 0.0
        return result


def throughput(device: torch.device, tokens: int, seconds: float, flops: float) -> dict[str, float]:
    """Rates of an update, and the share of the vendor's dense bf16 rate that this process reached. Where nothing was
    learnt, as when all groups are dead, there is no rate."""
    rates = {"tokens_per_second": tokens / seconds} if tokens and seconds else {}
    if device.type != "cuda":
        return rates
    device_name = torch.cuda.get_device_name(device)
    rate = next((value for part, value in MATRIX_RATES.items() if part in device_name), None)
    if rate is not None and rates:
        rates["mfu"] = flops / seconds / rate
    rates["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return rates
