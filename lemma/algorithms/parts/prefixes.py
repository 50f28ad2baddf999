"""How much of a teacher's trace begins each sample of a group."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from lemma.config import Options
from lemma.config.options import refuse_unused
from lemma.core.random import stream

Strategy = Literal["random", "fixed", "linear_max", "reverse_linear", "linear"]


class PrefixOptions(Options):
    """Which samples of a group begin with a teacher's trace, and with how much of it."""

    samples: int = Field(1, ge=-1)
    """Samples per problem that begin with the trace; -1 means all, 0 none. The others are the policy's own."""
    min: float = Field(1.0, ge=0, le=1)
    """Minimum share of the trace for random and fixed. With min and max at 1 the sample is the whole trace, and nothing
    is generated."""
    max: float = Field(1.0, ge=0, le=1)
    """Maximum share of the trace."""
    strategy: Strategy = "random"
    """How the share is chosen. `random`: uniformly from min to max. `fixed`: evenly spaced from min to max over the
    samples. `linear_max` and `reverse_linear`: uniformly from 0 to a limit that falls (or rises) in equal windows of
    steps. `linear`: falls linearly from max to 0 over the steps, the same for all samples of a problem."""
    steps: int | None = Field(None, ge=1)
    """Steps over which linear_max, reverse_linear and linear change the share; afterwards it stays constant."""
    windows: int = Field(10, ge=1)
    """Number of windows of linear_max and reverse_linear."""
    shared: bool = False
    """One share for all samples of a problem, instead of one per sample."""
    traced: float = Field(1.0, ge=0, le=1)
    """Share of a problem's draws in which its trace is used at all."""

    @model_validator(mode="after")
    def _works_together(self) -> PrefixOptions:
        changes = self.strategy in ("linear_max", "reverse_linear", "linear")
        if not self.samples:
            names = [name for name in type(self).model_fields if name != "samples"]
            refuse_unused(self, names, "with `samples: 0`", "write `samples: 1`")
        for name in ("max", "traced"):
            if not getattr(self, name):
                raise ValueError(
                    f"with `{name}: 0` no sample begins with the trace; write `samples: 0`, or a {name} above 0"
                )
        if changes:
            refuse_unused(self, ("min",), f"with `strategy: {self.strategy}`", "write `strategy: random`")
        elif self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; lower min")
        if changes and self.steps is None:
            raise ValueError(f"{self.strategy} needs the number of steps over which it changes; add `steps: 500`")
        if self.steps is not None and not changes:
            raise ValueError(
                f"steps has no effect with `strategy: {self.strategy}`; remove it, or write `strategy: linear_max`"
            )
        if self.strategy not in ("linear_max", "reverse_linear"):
            where = f"with `strategy: {self.strategy}`"
            refuse_unused(self, ("windows",), where, "write `strategy: linear_max`")
        if self.strategy == "linear" and not self.shared:
            raise ValueError("linear gives all samples of a problem the same share; add `shared: true`")
        if self.strategy == "fixed" and self.shared:
            raise ValueError("fixed gives each sample a share of its own; write `shared: false`")
        return self

    @property
    def least(self) -> float:
        """The smallest share of the trace in a sample that begins with it."""
        return self.min if self.strategy in ("random", "fixed") else 0.0

    def count(self, group_size: int) -> int:
        """How many samples begin with the trace."""
        return group_size if self.samples < 0 else self.samples

    def shares(self, group_size: int, *, seed: int, step: int, problem_id: str) -> list[float]:
        """The share of the trace in each sample: a pure function of these arguments (steps count from 0)."""
        count = self.count(group_size)
        noise = stream(seed, "prefix", step, problem_id)
        drawn, uniform = noise.random(), noise.random(group_size)[:count]
        if not count or drawn >= self.traced:
            return [0.0] * group_size
        if self.strategy == "fixed":
            shares = np.linspace(self.min, self.max, count) if count > 1 else np.array([self.max])
        elif self.strategy == "linear":
            shares = np.full(count, self.max * (1.0 - self._progress(step)))
        else:
            low, high = self._range(step)
            shares = low + (high - low) * (np.full(count, uniform[0]) if self.shared else uniform)
        return [*shares.tolist(), *[0.0] * (group_size - count)]

    def lengths(self, trace_tokens: int, group_size: int, *, seed: int, step: int, problem_id: str) -> list[int]:
        """How many tokens of the trace begin each sample; longest first, so the policy's own samples come last."""
        shares = self.shares(group_size, seed=seed, step=step, problem_id=problem_id)
        return sorted((math.floor(share * trace_tokens) for share in shares), reverse=True)

    def _range(self, step: int) -> tuple[float, float]:
        if self.strategy == "random":
            return self.min, self.max
        window = min(int(self._progress(step) * self.windows), self.windows - 1)
        part = self.windows - window if self.strategy == "linear_max" else window + 1
        return 0.0, self.max * part / self.windows

    def _progress(self, step: int) -> float:
        assert self.steps is not None
        return min(step / self.steps, 1.0)
