"""The tensors that a rank really holds in a step where nothing is split, against the memory plan."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lemma.learning import parameter_pieces as pieces
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.learning.optimiser import Optimiser, Split
from lemma.models.load_model import build_policy
from lemma.models.memory import Shape, plan_training
from lemma.models.model_options import ModelOptions, Precision, TinyOptions
from lemma.objectives import NegativeLogLikelihood
from tests.cluster.crew import Crew
from tests.models.small import CPU, trajectories

MODEL = ModelOptions(tiny=TinyOptions(hidden=128, layers=2, feed_forward=512, heads=4, kv_heads=2, context=64))
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS = 8


class Held(TorchDispatchMode):
    """Counts the bytes of all storages that operations have returned and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        self.peak = max(self.peak, self.now)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.now += size
            weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._known.remove(place)
        self.now -= size


def held(precision: Precision, shard: Split = "none") -> dict[str, float]:
    """Bytes a parameter in the second step: the most while packs are computed, when all of them are, and the most while
    weights are updated. The buckets that travel are small, as they are next to a large model."""
    policy = build_policy(MODEL, CPU, 0)
    policy.module.to(KINDS[precision])
    count = sum(parameter.numel() for parameter in policy.parameters().values())
    seen: dict[str, float] = {}
    update = Optimiser.step

    def watched(optimiser: Optimiser, rate: float) -> tuple[float, bool]:
        seen["computing"] = memory.peak / count
        seen["computed"], memory.peak = memory.now / count, memory.now
        found = update(optimiser, rate)
        seen["updated"], memory.peak = memory.peak / count, memory.now
        return found

    with mock.patch.object(pieces, "BUCKET", count // 256), Held() as memory:
        for parameter in policy.parameters().values():
            parameter.detach()  # counted from here on
        learner = Learner(policy, OptimOptions(), token_budget=TOKENS, total_steps=2, shard=shard)
        with mock.patch.object(Optimiser, "step", watched):
            for _ in range(2):
                learner.step(trajectories((7,) * 8), NegativeLogLikelihood())
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_that_splits_nothing_holds_all_sums_twice(crew: Crew, precision: Precision) -> None:
    """Its own sums and those over all ranks, however many there are; before that, what one process holds."""
    shape = Shape.of_tiny(MODEL.tiny)
    for ranks in (2, 4):
        plan = plan_training(shape, MODEL, precision, TOKENS, ranks=ranks)
        state = (plan.weights + plan.optimiser) / shape.parameters
        travelling = (plan.activations + plan.head + plan.gathered) / shape.parameters
        assert state == pytest.approx({"fp32": 16, "bf16": 18}[precision]) and travelling == pytest.approx(4)
        for found in crew.run(ranks, held, precision):
            assert found["computed"] == pytest.approx(state, rel=0.02)
            assert travelling - 0.1 < found["updated"] - found["computed"] < travelling + 0.8, "and a piece on its way"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_with_several_slots_holds_sums_of_those_it_has_computed(crew: Crew, precision: Precision) -> None:
    """As many as the stack of the tree is high, and the copy of a slot that has just ended."""
    shape = Shape.of_tiny(MODEL.tiny)
    for ranks, slots, shard in ((1, 2, "none"), (1, 3, "none"), (1, 4, "none"), (1, 8, "none"), (2, 8, "optimiser")):
        plan = plan_training(shape, MODEL, precision, TOKENS, ranks=ranks, slots=slots // ranks, shard=shard)
        planned = plan.weights + plan.optimiser + plan.activations + plan.head + plan.sums
        most = max(found["computing"] for found in crew.run(ranks, held, precision, shard, slots=slots))
        assert most == pytest.approx(planned / shape.parameters, abs=1.0), "a sum takes 4 bytes"
