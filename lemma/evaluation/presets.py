"""Settings of published evaluations by name. What a command says itself goes before them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lemma.core.errors import UserError, nearest
from lemma.evaluation.benchmarks import Benchmark


@dataclass(frozen=True)
class Preset:
    """`options` of the command, and the number of samples of benchmarks that are measured otherwise than ours."""

    options: dict[str, Any]
    samples: dict[str, int] = field(default_factory=dict)

    def of(self, benchmark: Benchmark) -> Benchmark:
        """The benchmark as this evaluation measures it."""
        if benchmark.name not in self.samples:
            return benchmark
        return benchmark.model_copy(update={"samples": self.samples[benchmark.name]})


PRESETS: dict[str, Preset] = {
    # Temperature 0.6 also for one sample; AIME and AMC are avg@32, which are our own defaults; the rest is pass@1.
    "luffy": Preset({"temperature": 0.6, "top_p": 1.0, "max_tokens": 8192}, {"gpqa_diamond": 1}),
}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise UserError(f"there is no preset '{name}'", fix=nearest(name, PRESETS))
    return PRESETS[name]
