"""The preference stage from a recipe to a finished model, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.packing import TokenBatch
from lemma.planning.plan_words import describe
from lemma.recipe import load_recipe
from lemma.runs import clock
from lemma.runs.clock import throughput
from lemma.stages.preference.examples import Example, Order
from lemma.stages.preference.scores import mismatched, precompute
from tests.models.small import CPU, in_float64, tiny_policy, trajectories
from tests.pretended import pretend_installed
from tests.stages.preference_world import ALGORITHMS, RECIPES, Row, World, toy_rows


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def of(rows: list[Row], axis: str) -> list[Row]:
    return [row for row in rows if row["axis"] == axis]


def assert_close(rows: list[Row], others: list[Row], rel: float) -> None:
    """The same numbers, but for how many packs there were."""
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        mine, theirs = ({k: v for k, v in one.items() if isinstance(v, float)} for one in (row, other))
        assert mine == pytest.approx(theirs, rel=rel, abs=rel / 10)


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [*ALGORITHMS, {"name": "dpo", "loss": {"aot": 0.5, "bco": 0.5}}, {"name": "kto", "loss": "apo_zero_unpaired"}],
    ids=str,
)
def test_a_toy_preference_is_learnt(world: World, algorithm: Any) -> None:
    rows = world.train(algorithm, {"steps": 50, "batch": {"examples": 16, "token_budget": 1024}})
    assert of(rows, "eval")[-1]["validation/rewards/accuracies"] > 0.95
    first, last = of(rows, "train")[0], of(rows, "train")[-1]
    assert last["rewards/margins"] > max(0.0, first["rewards/margins"])
    assert last["loss"] < first["loss"]


def test_the_arithmetic_of_updates_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of metrics has the rate of the updates since the last one, which only a GPU shows as MFU."""
    counted: list[tuple[int, float]] = []

    def noted(device: torch.device, tokens: int, seconds: float, flops: float) -> dict[str, float]:
        counted.append((tokens, flops))
        return throughput(device, tokens, seconds, flops)

    monkeypatch.setattr(clock, "throughput", noted)
    world.train("dpo", {"steps": 2})
    assert len(counted) == 2 and all(flops > tokens > 0 for tokens, flops in counted)


def test_rows_of_metrics_and_the_best_checkpoint(world: World) -> None:
    rows = world.train("dpo", {"steps": 6, "validation": {"share": 0.25, "every": 2}})
    names = {f"{kind}/{side}" for kind in ("rewards", "logps") for side in ("chosen", "rejected")}
    names |= {"loss", "rewards/margins", "rewards/accuracies", "rewards/mean", "kl"}
    assert all(names <= row.keys() for row in of(rows, "train"))
    assert all({f"validation/{name}" for name in names} <= row.keys() for row in of(rows, "eval"))
    documented = (RECIPES.parents[1] / "docs" / "preference.md").read_text()
    own = {name for name in of(rows, "train")[0] if "/" in name}
    assert own and not [name for name in own if f"`{name}`" not in documented]
    first = of(rows, "train")[0]
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-5), "policy and reference begin alike"
    assert (first["rewards/margins"], first["kl"]) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert [row["step"] for row in of(rows, "eval")] == [2, 4, 6]
    best = min(of(rows, "eval"), key=lambda row: row["validation/loss"])
    store = world.run / "stages" / "prefer" / "checkpoints"
    known = {"step": best["step"], "score": best["validation/loss"], "metric": "loss"}
    assert json.loads((store / "best.json").read_text()) == known
    assert (world.run / "stages" / "prefer" / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "algorithm", ["kto", {"name": "dpo", "loss": "aot"}, {"name": "dpo", "loss": "bco"}, "orpo"], ids=str
)
def test_micro_batches_do_not_matter(world: World, algorithm: Any) -> None:
    """Whatever is sorted, averaged or compared over the step: packs of one pair give what one pack gives."""
    few, many = (
        world.train(algorithm, {"batch": {"examples": 8, "token_budget": budget}}, f"run-{budget}")
        for budget in (32, 4096)
    )
    assert of(few, "train")[0]["packs"] > of(many, "train")[0]["packs"] == 1
    assert_close(few, many, 2e-4)


@pytest.mark.parametrize(("label", "absent"), [(True, "rejected"), (False, "chosen")])
def test_a_step_without_one_of_the_sides_says_nothing_of_it(world: World, label: bool, absent: str) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": label} for row in toy_rows(16)]
    world.data = world.write("judged.jsonl", rows)
    for row in world.train("kto", {"steps": 2}):
        assert not [name for name in row if name.endswith((f"/{absent}", "/margins"))]
        assert [name for name in row if name.endswith("/rejected" if label is False else "/chosen")]


# --- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_a_precomputed_reference_is_the_model_without_its_adapters(world: World, algorithm: str) -> None:
    lora = {"r": 4, "alpha": 8}
    once = world.train(algorithm, {"reference": "precomputed"}, "once", lora=lora)
    each = world.train(algorithm, {"reference": "adapters_off"}, "each", lora=lora)
    assert of(once, "train")[-1]["kl"] > 0
    assert_close(once, each, 1e-4)


def test_the_reference_is_computed_once(world: World) -> None:
    first = world.train("kto", run="first")
    assert world.scored() == 80, "every prompt with either response, mismatched or not; nothing twice"
    (entry,) = (world.folder / "cache" / "reference").iterdir()
    again = world.train("kto", run="again")
    assert world.scored() == 0 and again == first
    entry.write_bytes(entry.read_bytes()[:-3] + b"bad")
    assert world.train("kto", run="damaged") == first
    assert world.scored() == 80
    world.train("kto", run="other", tiny={"hidden": 32, "layers": 1, "feed_forward": 48, "context": 96})
    assert world.scored() == 80, "another model is another reference"


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ({}, {"compile_blocks": True}),
        ({}, {"token_budget": 65}),
        ({}, {"share_prompts": True}),
        ({"fused": False}, {}),
        ({"override": {"rope_theta": 500.0}}, {}),
    ],
    ids=str,
)
def test_scores_had_in_another_way_are_scored_again(model: Row, how: Row, tmp_path: Path) -> None:
    empty = Trajectory(np.array([3, 5, 7]), np.zeros(3, dtype=bool))

    def entries(model: Row, how: Row) -> int:
        """How many files the cache holds once the reference was asked."""
        policy = tiny_policy(**model)
        settings: Row = {"token_budget": 64, "total_steps": 1}
        learner = Learner(policy, OptimOptions(), **settings | how)
        precompute(policy, learner, [empty], tmp_path, lambda done, total: None)
        return len(list(tmp_path.iterdir()))

    assert entries({}, {}) == entries({}, {}) == 1
    assert entries(model, how) == 2


def test_scores_of_another_kernel_are_scored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, folder = tiny_policy(), tmp_path / "reference"
    learner = Learner(policy, OptimOptions(), token_budget=64, total_steps=1)
    empty = Trajectory(np.array([3, 5, 7]), np.zeros(3, dtype=bool))

    def entries() -> int:
        precompute(policy, learner, [empty], folder, lambda done, total: None)
        return len(list(folder.iterdir()))

    assert entries() == entries() == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert entries() == 2
    finally:
        torch.use_deterministic_algorithms(False)
    pretend_installed("flash-attn-4", "4.0.0", tmp_path / "packages", monkeypatch)
    assert entries() == 3


@pytest.mark.parametrize("algorithm", ["cpo", "simpo", "orpo", {"name": "dpo", "reference_free": True}], ids=str)
def test_losses_without_a_reference_hold_none(world: World, algorithm: Any) -> None:
    rows = world.train(algorithm)
    assert world.scored() == 0 and not (world.folder / "cache" / "reference").exists()
    assert "kl" not in rows[0]


def test_adapters_cannot_be_switched_off_where_there_are_none(world: World) -> None:
    with pytest.raises(
        UserError, match=r"recipe\.yaml:\d+: stages\.prefer\.reference: .*adapter to switch off; add model"
    ):
        world.recipe("dpo", {"reference": "adapters_off"})


def test_dropout_is_off(world: World) -> None:
    plain = world.train("dpo", run="plain", lora={"r": 4})
    dropped = world.train("dpo", run="dropped", lora={"r": 4, "dropout": 0.5})
    assert "prefer: the model's dropout is off in stages of kind preference" in world.said()
    assert dropped == plain


def test_squared_mass_is_the_sum_of_squared_probabilities() -> None:
    policy = in_float64(tiny_policy())
    items = trajectories((9, 14, 6, 11))
    batch = TokenBatch.build(items, range(4), CPU, torch.float64)
    found = policy.outputs(batch, ["collisions"], temperature=0.7)["collisions"]
    hidden = policy.hidden(batch.ids_T, batch.positions_T, batch.segments)[batch.targets_N - 1]
    logp = (hidden @ policy.head.weight.T / 0.7).log_softmax(-1)
    torch.testing.assert_close(found, (2 * logp).logsumexp(-1), rtol=1e-10, atol=1e-10)


def test_a_weighted_pair_counts_less(world: World) -> None:
    """At the start every weight is below 1 (WPO), so the loss is below log 2."""
    rows = world.train({"name": "dpo", "weighting": True})
    assert 0 < of(rows, "train")[0]["loss"] < 0.97 * np.log(2)


# --- KTO's mismatched pairs ------------------------------------------------------------------------------------------


def example(prompt: int, response: int) -> Example:
    return Example(np.array([prompt, 5]), (np.array([response, 1]),), (1,))


def test_mismatched_pairs_come_from_the_step() -> None:
    found = mismatched([example(10, 20), example(11, 21), example(11, 22), example(12, 23)], 90)
    assert [one.ids_T.tolist() for one in found] == [[10, 5, 23, 1], [11, 5, 20, 1], [11, 5, 20, 1], [12, 5, 22, 1]]
    assert all(one.loss_mask_T.tolist() == [False, False, True, True] for one in found)
    assert mismatched([example(10, 20), example(10, 21)], 90) == []
    assert [len(one) for one in mismatched([example(10, 20), example(11, 21)], 3)] == [3, 3]


@pytest.mark.parametrize(
    ("count", "fewest", "sizes"),
    [(18, 2, [18]), (35, 2, [17, 18]), (36, 2, [17, 17, 2]), (34, 2, [17, 17]), (1, 2, [1]), (18, 1, [17, 1])],
)
def test_what_is_left_of_an_epoch(count: int, fewest: int, sizes: list[int]) -> None:
    order = Order(count, 17, seed=1, name="prefer", shuffle=True, fewest=fewest)
    for epoch in range(2):
        steps = [order.batch(epoch * order.steps_per_epoch + place) for place in range(order.steps_per_epoch)]
        assert [len(step) for step in steps] == sizes
        assert sorted(number for step in steps for number in step) == list(range(count))
    learnt = [sum(len(order.batch(index)) for index in range(steps)) for steps in range(6)]
    assert [order.learnt(steps) for steps in range(6)] == learnt


def test_no_response_is_alone_in_a_step_of_kto(tmp_path: Path) -> None:
    world = World(tmp_path, toy_rows(9))
    many = {"steps": None, "epochs": 2, "batch": {"examples": 17, "token_budget": 512}, "validation": {}}
    first, second = world.train("kto", many | {"optim": {"lr": 1e-2}})
    assert (second["epoch"], second["packs"]) == (2.0, first["packs"])
    assert second["reference_point"] > 0
    assert len(world.train({"name": "kto", "loss": "apo_zero_unpaired"}, many, "apo")) == 4, "it estimates nothing"


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "changes", "sentence"),
    [
        ({"name": "dop"}, {}, "did you mean 'dpo'"),
        ({"name": "dpo", "loss": "hinge", "label_smoothing": 0.1}, {}, "label_smoothing has no effect on hinge"),
        ({"name": "dpo", "loss": "aot", "divergence": "js"}, {}, "divergence: js is not defined for aot"),
        ({"name": "dpo", "reference_free": True, "divergence": "js"}, {}, "there is no divergence"),
        ({"name": "dpo", "loss": "aot", "weighting": True}, {}, "aot sorts the pairs, so a weight has no pair; remove"),
        ({"name": "dpo", "loss": {"ipo": 1, "aot_unpaired": 1}, "weighting": True}, {}, "aot_unpaired sorts the pairs"),
        ({"name": "cpo", "loss": "ipo", "label_smoothing": 0.1}, {}, "label_smoothing has no effect on ipo"),
        ("kto", {"batch": {"examples": 1}}, "write `examples: 2` or more"),
        ("dpo", {"epochs": 1}, "give epochs or steps, not both"),
        ("dpo", {"data": {"mix": [{"source": "journal:x"}]}}, "a journal cannot be mixed .* as data.source alone"),
        (
            "dpo",
            {"validation": {"data": {"mix": [{"source": "journal:x"}]}}},
            "a journal cannot be mixed .* as validation.data.source alone",
        ),
        (
            "dpo",
            {"data": {"source": "journal:x", "split": "test", "keep_if": "right"}},
            "split and keep_if have no effect on the journal that data names; remove them",
        ),
        (
            "dpo",
            {"validation": {"data": {"source": "journal:x", "reader": "chat"}}},
            "reader has no effect on the journal that validation.data names; remove it",
        ),
        (
            "dpo",
            {"data": {"source": "journal:x", "arithmetic": {"count": 3}}},
            "arithmetic has no effect on the journal",
        ),
        (
            "dpo",
            {"data": {"source": "journal:x", "count": 0}},
            "`count: 0` takes no pair of the journal that data names",
        ),
        ({"name": "orpo", "gamma": 1}, {}, r"unknown key"),
        ({"name": "dpo", "tau": 0.1}, {}, "tau has no effect on sigmoid; remove it, or write `loss: discopop`"),
        ({"name": "dpo", "shift": False}, {}, "shift has no effect on sigmoid; remove it, or write `loss: bco`"),
        ({"name": "dpo", "divergence_alpha": 0.1}, {}, "divergence_alpha has no effect on reverse_kl"),
        ("simpo", {"reference": "adapters_off"}, "simpo holds no reference here; remove `reference: adapters_off`"),
        ({"name": "dpo", "reference_free": True}, {"reference": "adapters_off"}, "dpo holds no reference here"),
        ("dpo", {"journal": {"gap": 0.5}}, "options of journal have no effect without `source: journal`"),
    ],
)
def test_wrong_options_get_one_sentence(world: World, algorithm: Any, changes: Row, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        world.recipe(algorithm, changes)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dpo", "loss": {"discopop": 0.5, "bco": 0.5}, "tau": 0.1, "shift": False},
        {"name": "dpo", "divergence": "alpha", "divergence_alpha": 0.1},
    ],
    ids=str,
)
def test_options_that_have_an_effect_are_taken(world: World, algorithm: Any) -> None:
    recipe = world.recipe(algorithm)
    path = world.folder / "resolved.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe


def test_the_plan_says_what_is_learnt(world: World) -> None:
    plan = describe(world.recipe({"name": "dpo", "loss": {"sigmoid": 0.8, "bco": 0.2}}))
    assert "dpo, beta 0.1, loss 0.2 bco + 0.8 sigmoid" in plan and "8 pairs a step" in plan
    assert "computed once" in plan
    plan = describe(world.recipe("kto", {"data": {"source": "journal:runs/x"}}))
    assert "8 responses a step" in plan and "pairs from the samples in runs/x" in plan
    assert "none" in describe(world.recipe("simpo")).split("reference  ")[1].split("\n")[0]
