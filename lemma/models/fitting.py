"""How a model is trained in a given memory: all of its weights, adapters, or adapters on 4-bit weights; how many tokens
are computed at a time, and which blocks twice.

Large packs keep a GPU busy, since every pack costs the host the same; recomputation costs a quarter of the time. So the
largest budget without recomputation is taken, then as few recomputed blocks as fit, then smaller packs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from lemma.models.memory import GIB, Shape, plan_training
from lemma.models.model_options import LoraOptions, ModelOptions, Precision

# What is left for the engine's cache, the libraries and what else runs on the device.
SHARE = 0.75
USUAL_BUDGET, LEAST_BUDGET = 16384, 2048
BUDGETS = (USUAL_BUDGET, 8192, 4096, LEAST_BUDGET)
# Of a GPU's memory: an update alone, and one that leaves room for an engine's cache.
ALONE, WITH_ENGINE = 0.85, 0.6
GPU_BUDGETS = (65536, 32768, 16384, 8192)
# Shapes of a widespread family by billions of parameters, for models that are not on this machine yet.
USUAL = {
    0.5: Shape(24, 896, 896, 128, 4864, 151936, True),
    1.5: Shape(28, 1536, 1536, 256, 8960, 151936, True),
    3.0: Shape(36, 2048, 2048, 256, 11008, 151936, True),
    7.0: Shape(28, 3584, 3584, 512, 18944, 152064, False),
    14.0: Shape(48, 5120, 5120, 1024, 13824, 152064, False),
    32.0: Shape(64, 5120, 5120, 1024, 27648, 152064, False),
    72.0: Shape(80, 8192, 8192, 1024, 29568, 152064, False),
}
SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)([bm])(?![a-z])", re.IGNORECASE)

Way = Literal["full", "lora", "4bit"]


@dataclass(frozen=True)
class Fit:
    """How to train, and the bytes that this takes by the plan."""

    way: Way
    checkpointing: bool
    token_budget: int
    planned: float
    fits: bool = True


def guess_shape(name: str) -> Shape | None:
    """The shape that a model of the size in this name probably has; larger rather than smaller."""
    match = SIZE.search(name.rpartition("/")[2])
    if match is None:
        return None
    billions = float(match[1]) * (1.0 if match[2].lower() == "b" else 1e-3)
    return USUAL[next((size for size in USUAL if size >= 0.9 * billions), max(USUAL))]


def fit_memory(shape: Shape, memory: float, precision: Precision, *, copies: int = 1, only: Way | None = None) -> Fit:
    """The way to train that changes most weights and computes most at a time within a share of `memory` bytes; the
    smallest one where none fits. `copies` counts models of this size that are held, such as a frozen reference."""
    tried: list[Fit] = []
    ways: tuple[Way, ...] = ("full", "lora", "4bit") if precision != "fp32" else ("full", "lora")
    for way in ways if only is None else (only,):
        lora = None if way == "full" else LoraOptions()
        model = ModelOptions(path="x", lora=lora, quantize="4bit" if way == "4bit" else None)
        for checkpointing in (False, True):
            options = model.model_copy(update={"checkpointing": checkpointing})
            for budget in BUDGETS:
                plan = plan_training(shape, options, precision, budget, on_cpu=precision == "fp32")
                needed = plan.total + (copies - 1) * (plan.weights if way == "full" else 0.0)
                tried.append(Fit(way, checkpointing, budget, needed))
                if needed <= SHARE * memory:
                    return tried[-1]
    return replace(min(tried, key=lambda fit: fit.planned), fits=False)


def host_budget(
    shape: Shape,
    model: ModelOptions,
    precision: Precision,
    memory: float,
    *,
    moments: float = 8.0,
    critic: bool = False,
    reference: bool = False,
) -> int:
    """The most tokens at a time whose update fits into a share of `memory` bytes on a CPU; the fewest where none does.

    Small packs cost a CPU next to nothing: no block is computed twice for the sake of larger ones.
    """
    for budget in BUDGETS:
        plan = plan_training(shape, model, precision, budget, moments=moments, on_cpu=True)
        if plan.beside(critic=critic, reference=reference).total <= SHARE * memory:
            return budget
    return BUDGETS[-1]


@dataclass(frozen=True)
class UpdateFit:
    """Tokens at a time, and how many of the model's blocks are recomputed."""

    token_budget: int
    recomputed: int


def fit_update(
    shape: Shape,
    model: ModelOptions,
    precision: Precision,
    memory: float,
    *,
    token_budget: int | None = None,
    with_engine: bool = False,
    moments: float = 8.0,
    critic: bool = False,
    reference: bool = False,
    ranks: int = 1,
    slots: int = 1,
    shard: str = "none",
) -> UpdateFit:
    """What fits into `memory` bytes by the plan; the smallest where nothing does. What the options say stays."""
    room = memory * (WITH_ENGINE if with_engine else ALONE)

    def fits(budget: int, recomputed: int, room: float = room) -> bool:
        plan = plan_training(
            shape, model, precision, budget,
            moments=moments, ranks=ranks, slots=slots, shard=shard, recomputed=recomputed,
        )  # fmt: skip
        return plan.beside(critic=critic, reference=reference).total <= room

    budgets = GPU_BUDGETS if token_budget is None else (token_budget,)
    counts = range(shape.layers + 1) if model.checkpointing is None else [shape.layers * model.checkpointing]
    for budget in budgets:
        if fits(budget, counts[0]):
            return UpdateFit(budget, counts[0])
    for count in counts:
        if fits(token_budget or USUAL_BUDGET, count):
            return UpdateFit(token_budget or USUAL_BUDGET, count)
    if token_budget is not None:
        return UpdateFit(token_budget, counts[-1])
    # Small packs save little of what weights and optimiser take: where these leave an engine less, it gets the rest.
    for most in (room, memory * ALONE):
        for budget in BUDGETS:
            if fits(budget, counts[-1], most):
                return UpdateFit(budget, counts[-1])
    return UpdateFit(LEAST_BUDGET, counts[-1])


def in_gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def host_memory() -> int:
    """In bytes. The same at every call on a machine: what is free at the moment does not count."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, memory_limit() or 2**63)


def memory_limit(root: Path = Path("/")) -> int | None:
    """The lowest limit that a control group sets for this process, of version 1 or 2; None where there is none."""
    groups = root / "sys/fs/cgroup"
    limits: list[int] = []
    for names, path in _memberships(root / "proc/self/cgroup"):
        if "memory" in names:
            limits += _limits(groups / "memory", path, "memory.limit_in_bytes")
        elif not any(names):
            for place in (groups, groups / "unified"):
                limits += _limits(place, path, "memory.max")
    return min(limits, default=None)


def _memberships(file: Path) -> Iterator[tuple[list[str], PurePosixPath]]:
    """The controllers of each hierarchy, of which version 2 names none, and the group in it."""
    with suppress(OSError):
        for line in file.read_text(errors="surrogateescape").splitlines():
            if line.count(":") >= 2:
                _, names, path = line.split(":", 2)
                yield names.split(","), PurePosixPath(path.lstrip("/"))


def _limits(place: Path, path: PurePosixPath, name: str) -> Iterator[int]:
    """Limits of a group and of all above it. A container may see its own group at the top, under another path."""
    for group in (path, *path.parents):
        # `max` in version 2; version 1 has a number that no machine reaches.
        with suppress(OSError, ValueError):
            yield int((place / group / name).read_text())
