"""Steps of the learner on 1, 2, 3 and 4 ranks: the same bits for the same slots, whatever is dealt out."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from lemma.core import ranks
from lemma.core.errors import UserError
from lemma.learning import gradients
from lemma.learning import parameter_pieces as pieces
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.learning.optimiser import Optimiser
from lemma.learning.optimiser_state import load_optimiser, optimiser_state
from lemma.models import attention, flash_attention
from lemma.models.memory import Shape
from lemma.models.model_options import ModelOptions
from lemma.models.policy import Policy
from lemma.objectives import NegativeLogLikelihood, Objective
from lemma.runs.fitted import least_split
from tests.cluster.crew import Crew
from tests.learning.test_invariance import EXACT, MAKE, items_of
from tests.models.small import relative, tiny_policy, trajectories

KINDS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def policy_in(kind: str) -> Policy:
    policy = tiny_policy(lora=False)
    policy.module.to(KINDS[kind])
    return policy


def learner_of(policy: Policy, shard: str, budget: int = 50, **options: Any) -> Learner:
    optim = OptimOptions(lr=1e-3, clip=0.5, weight_decay=0.1, **options)
    return Learner(policy, optim, token_budget=budget, total_steps=4, temperature=0.7, shard=shard)  # type: ignore[arg-type]


def outcome(policy: Policy, learner: Learner, objective: Objective, steps: int) -> dict[str, Any]:
    """Everything that these steps leave behind, as bytes where it is to be compared to the last bit."""
    items = (
        items_of(policy) if policy.head.weight.dtype == torch.float64 else trajectories((7, 31, 5, 12, 2, 40, 19, 19))
    )
    reports = [learner.step(items, objective) for _ in range(steps)]
    return {
        "reports": [(r.loss, r.grad_norm, r.packs, sorted(r.metrics.items())) for r in reports],
        "weights": {name: bits(parameter) for name, parameter in policy.parameters().items()},
        "scores": [part.tobytes() for part in learner.score(items)],
        "held out": sorted(learner.evaluate(items, objective).items()),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def steps_of(kind: str, name: str, shard: str, largest: int, steps: int = 2) -> dict[str, Any]:
    """Some steps on this rank's world; parameters are cut into pieces of at most `largest` numbers, which travel in
    several windows where there are two ranks or more."""
    with mock.patch.object(pieces, "LARGEST", largest), mock.patch.object(pieces, "BUCKET", largest):
        policy = policy_in(kind)
        objective: Objective = MAKE[name]() if name != "nll" else NegativeLogLikelihood()
        return outcome(policy, learner_of(policy, shard), objective, steps)


def test_every_objective_on_1_2_and_4_ranks(crew: Crew) -> None:
    """In float64 the same bits for four slots, and one slot's numbers within rounding."""
    for number, name in enumerate(MAKE):
        alone = crew.run(1, steps_of, "float64", name, "none", 2**24, 1, slots=4)[0]
        count, shard = ((2, "none"), (4, "optimiser"))[number % 2]
        for found in crew.run(count, steps_of, "float64", name, shard, 2**24, 1, slots=4):
            assert found == alone, (name, count)
        single = steps_of("float64", name, "none", 2**24, 1)
        for key, weight in alone["weights"].items():
            mine, other = (
                torch.frombuffer(bytearray(one), dtype=torch.float64) for one in (weight, single["weights"][key])
            )
            assert relative(mine, other) < EXACT, (name, key)
        assert alone["reports"][0][0] == pytest.approx(single["reports"][0][0], rel=EXACT)


def uses_flash(failing: int | None) -> bool:
    """Whether this rank uses FlashAttention, which was found wrong on the rank `failing`."""
    state = flash_attention.FlashState(has_failed=ranks.rank() == failing)
    with mock.patch.object(flash_attention, "_state", state):
        learner_of(policy_in("float32"), "none")
        return flash_attention.is_flash_allowed()


def test_all_ranks_use_the_same_kernel_of_attention(crew: Crew) -> None:
    assert crew.run(2, uses_flash, None, slots=2) == [True, True]
    assert crew.run(2, uses_flash, 1, slots=2) == [False, False]


def first_uses_flash(failing: int | None, shard: str) -> tuple[int, bool, int]:
    """As above, where it is found wrong when it is first used on this rank: how often it was used before the ranks
    agreed, whether it may be used after that, and how often it is in a step."""
    state, used = flash_attention.FlashState(is_allowed=False), []

    def kernel(*parts: Any) -> torch.Tensor:
        used.append(parts)
        return attention._bucketed(*parts)

    @cache
    def tried(kind: object) -> Any:
        if ranks.rank() != failing:
            return kernel
        flash_attention._has_failed("it is wrong here")
        return None

    with (
        mock.patch.object(flash_attention, "_state", state),
        mock.patch.object(flash_attention, "_tried_kernel", tried),
        mock.patch.object(attention, "has_varlen", lambda *_: True),
        mock.patch.object(attention, "varlen", attention._bucketed),
        warnings.catch_warnings(action="ignore"),
    ):
        learner = learner_of(policy_in("float32"), shard)
        before = len(used)
        learner.step(trajectories((7, 31, 5, 12, 2, 40)), NegativeLogLikelihood())
        return before, flash_attention.is_flash_allowed(), len(used) - before


def test_ranks_that_split_the_weights_agree_after_the_first_use(crew: Crew) -> None:
    """Their model was probed in host memory, where there is no such kernel."""
    found = crew.run(2, first_uses_flash, None, "weights", slots=2)
    assert all(before > 0 and is_allowed and later > 0 for before, is_allowed, later in found)
    found = crew.run(2, first_uses_flash, 1, "weights", slots=2)
    assert [one[1:] for one in found] == [(False, 0)] * 2
    assert [before for before, _, _ in crew.run(2, first_uses_flash, None, "none", slots=2)] == [0, 0], (
        "no pass is added"
    )


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_every_way_to_share_gives_the_same_bits(crew: Crew, kind: str) -> None:
    """Pieces smaller than parameters, more ranks than slots, slots that no number of ranks divides."""
    for slots, counts in ((1, (2,)), (4, (2, 4)), (6, (4,))):
        alone = crew.run(1, steps_of, kind, "nll", "none", 1000, slots=slots)[0]
        rounds = crew.run(1, steps_of, kind, "nll", "gradients", 1000, slots=slots)[0]
        for count in counts:
            for shard, expected in (("none", alone), ("optimiser", alone), ("gradients", rounds)):
                found = crew.run(count, steps_of, kind, "nll", shard, 1000, slots=slots)
                assert all(one == expected for one in found), (slots, count, shard)
        if slots == 1:  # one slot alone is what a single process computes, on one thread as each rank has
            torch.set_num_threads(1)
            assert rounds == alone == steps_of(kind, "nll", "none", 1000)
            whole = steps_of(kind, "nll", "none", 2**24)
            assert whole["weights"].keys() == alone["weights"].keys()


def idle(shard: str) -> dict[str, Any]:
    """One pack for four ranks; three of them have nothing to do."""
    policy = policy_in("float32")
    return outcome(policy, learner_of(policy, shard, budget=10**6), NegativeLogLikelihood(), steps=1)


def test_ranks_without_work_take_part(crew: Crew) -> None:
    alone = crew.run(1, idle, "none", slots=4)[0]
    for shard in ("none", "optimiser", "gradients"):
        assert all(found == alone for found in crew.run(4, idle, shard, slots=4)), shard


def out_of_memory(on: int, least: int, shard: str, budget: int = 80) -> tuple[dict[str, Any], int] | str:
    """Rank `on` cannot hold packs of more than `least` tokens."""
    policy = policy_in("float32")
    learner = learner_of(policy, shard, budget=budget)
    terms = learner._terms

    def small(batch: Any, *more: Any) -> Any:
        if batch.tokens > least and ranks.rank() == on:
            raise torch.OutOfMemoryError
        return terms(batch, *more)

    learner._terms = small  # type: ignore[method-assign]
    try:
        return outcome(policy, learner, NegativeLogLikelihood(), steps=1), learner.token_budget
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("shard", ["optimiser", "gradients"])
def test_all_agree_where_one_runs_out_of_memory(crew: Crew, shard: str) -> None:
    one, two = crew.run(2, out_of_memory, 0, 50, shard, slots=4)
    assert one == two and one[1] == 40
    assert one == crew.run(1, out_of_memory, 1, 50, shard, 40, slots=4)[0], "nothing of the first attempt is left"
    sentences = crew.run(4, out_of_memory, 1, 10, shard, slots=4)
    assert len(set(sentences)) == 1 and "a single sequence of" in sentences[0]


def saved(kind: str, shard: str, steps: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    policy = policy_in(kind)
    with mock.patch.object(pieces, "LARGEST", 1000):
        learner = learner_of(policy, shard)
        for _ in range(steps):
            learner.step(trajectories((7, 31, 5, 12, 2, 40, 19, 19)), NegativeLogLikelihood())
        tensors, extra = learner.state()
    return {name: (bits(tensor), tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, extra  # type: ignore[misc]


def resumed(kind: str, shard: str, tensors: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    policy = policy_in(kind)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.fill_(0.25)
    given = {n: torch.frombuffer(bytearray(b), dtype=kind).view(shape) for n, (b, kind, shape) in tensors.items()}
    with mock.patch.object(pieces, "LARGEST", 1000):
        learner = learner_of(policy, shard)
        addresses = [parameter.data_ptr() for parameter in policy.parameters().values()]
        learner.load(given, extra)
        found = outcome(policy, learner, NegativeLogLikelihood(), steps=1)
        assert addresses == [parameter.data_ptr() for parameter in policy.parameters().values()]
    return found


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_state_of_some_ranks_goes_on_with_others(crew: Crew, kind: str) -> None:
    """4 to 1, 2 to 4, 1 to 2, and from one way of sharing to another: each piece is saved once."""
    expected = crew.run(1, steps_of, kind, "nll", "none", 1000, slots=4)[0]
    for before, after, first, second in (
        (4, 1, "optimiser", "none"),
        (2, 4, "none", "optimiser"),
        (1, 2, "none", "none"),
    ):
        parts = crew.run(before, saved, kind, first, 1, slots=4)
        tensors = {name: tensor for own, _ in parts for name, tensor in own.items()}
        assert len(tensors) == sum(len(own) for own, _ in parts)
        found = crew.run(after, resumed, kind, second, tensors, parts[0][1], slots=4)
        for one in found:
            assert one["weights"] == expected["weights"] and one["scores"] == expected["scores"], (before, after)


def largest_exchange(shard: str) -> int:
    """Numbers that a rank sends or gets at once, at most, where pieces are as long as they may be."""
    sizes = []
    exchange = gradients.exchange

    def counted(given: torch.Tensor, given_sizes: Any, taken_sizes: Any, place: str) -> torch.Tensor:
        sizes.extend([given.numel(), sum(taken_sizes)])
        return exchange(given, given_sizes, taken_sizes, place)

    with (
        mock.patch.object(pieces, "LARGEST", 1000),
        mock.patch.object(pieces, "BUCKET", 600),
        mock.patch.object(gradients, "exchange", counted),
    ):
        learner_of(policy_in("float32"), shard).step(trajectories((7, 31, 5, 12)), NegativeLogLikelihood())
    return max(sizes)


@pytest.mark.parametrize("shard", ["optimiser", "gradients"])
def test_what_travels_fits_a_bucket_on_any_number_of_ranks(crew: Crew, shard: str) -> None:
    assert {size for count in (2, 4) for size in crew.run(count, largest_exchange, shard, slots=count)} == {600}


def test_pieces_and_homes() -> None:
    with mock.patch.object(pieces, "LARGEST", 10):
        found = pieces.cut({"a": torch.zeros(5, 5), "b": torch.zeros(3), "empty": torch.zeros(0)}, 2)
    assert [(p.name, p.start, p.stop, p.mark) for p in found] == [
        ("a", 0, 10, "@0"),
        ("a", 10, 20, "@10"),
        ("a", 20, 25, "@20"),
        ("b", 0, 3, ""),
        ("empty", 0, 0, ""),
    ]
    assert [p.home for p in found] == [0, 1, 0, 1, 1]
    assert pieces.deal([3, 9, 4, 4], 2) == [1, 0, 1, 1]
    loads = np.bincount(pieces.deal([5, 5, 4, 4, 3, 3], 3), weights=[5, 5, 4, 4, 3, 3])
    assert loads.tolist() == [8, 8, 8]


def test_the_order_of_a_sum_does_not_depend_on_who_adds() -> None:
    """Words instead of numbers, which show how they were put together."""

    def word(node: gradients.Node) -> str:
        if node[1] - node[0] == 1:
            return chr(97 + node[0])
        return "(" + "".join(map(word, gradients.halves(node))) + ")"

    for count in range(1, 12):
        for size in range(1, 14):
            blocks = [range(rank * count // size, (rank + 1) * count // size) for rank in range(size)]
            parts = {node: word(node) for own in blocks for node in gradients.nodes_within(own, count)}
            assert [slot for node in parts for slot in range(*node)] == list(range(count))
            assert gradients.fold(count, parts, lambda left, right: f"({left}{right})") == word((0, count))
    assert gradients.nodes_within(range(3, 8), 8) == [(3, 4), (4, 8)]


def test_what_is_split_follows_the_memory_plan() -> None:
    """Where nothing is said: 7B on eight GPUs of 80 GiB has room for whole gradients, 14B has not."""
    gib = 2.0**30
    of_7b = Shape.of_config(dict(zip(SHAPE_KEYS, (28, 3584, 18944, 28, 4, 152064), strict=True)))
    of_14b = Shape.of_config(dict(zip(SHAPE_KEYS, (48, 5120, 13824, 40, 8, 152064), strict=True)))
    assert least_split(of_7b, ModelOptions(), "bf16", 80 * gib, 8) == "optimiser"
    assert least_split(of_7b, ModelOptions(), "bf16", 60 * gib, 8) == "gradients"
    assert least_split(of_14b, ModelOptions(), "bf16", 80 * gib, 8) == "gradients"
    assert least_split(of_7b, ModelOptions(), "bf16", 80 * gib, 8, slots=2) == "gradients", "sums of a slot wait"


SHAPE_KEYS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)


def test_a_state_is_read_however_it_was_cut() -> None:
    """Masters and moments; a hole in them is another model."""
    first, second = ({"w": torch.nn.Parameter(torch.ones(4, 6))} for _ in range(2))
    with mock.patch.object(pieces, "LARGEST", 9):
        optimiser = Optimiser(first, OptimOptions(lr=0.1))
        for _ in range(2):
            first["w"].grad = torch.arange(24.0).view(4, 6)
            optimiser.step(0.1)
        tensors, extra = optimiser_state(optimiser)
    assert sorted(key for key in tensors if key.startswith("weight")) == ["weight/w@0", "weight/w@18", "weight/w@9"]
    with mock.patch.object(pieces, "LARGEST", 10):
        other = Optimiser(second, OptimOptions(lr=0.1))
        load_optimiser(other, {name: tensor.clone() for name, tensor in tensors.items()}, extra)
        for given, one in ((first, optimiser), (second, other)):
            given["w"].grad = -torch.ones(4, 6)
            one.step(0.1)
    assert torch.equal(first["w"], second["w"]) and first["w"].unique().numel() > 10
    del tensors["weight/w@9"]
    with pytest.raises(UserError, match=r"w is \(4, 6\) here and without its numbers from 9 on there"):
        load_optimiser(other, tensors, extra)
