"""The preference stage from a recipe to a finished model, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lemma.cli.plan import describe
from lemma.core.errors import UserError
from lemma.core.events import Event, Progressed, Said
from lemma.core.types import Trajectory
from lemma.models.packing import TokenBatch
from lemma.recipe import load_recipe
from lemma.rollouts.journal import Journal
from lemma.rollouts.sample import Sample
from lemma.training.learner import Learner
from lemma.training.options import OptimOptions
from lemma.training.preference_data import Example, journal_pairs
from lemma.training.preference_options import JournalOptions
from lemma.training.preference_scores import SquaredMass, mismatched, precompute
from lemma.training.run import train
from tests.models.small import CPU, in_float64, tiny_policy, trajectories

STAGE: dict[str, Any] = {
    "kind": "preference",
    "steps": 4,
    "batch": {"examples": 8, "token_budget": 512},
    "optim": {"lr": 3e-3},
    "validation": {"share": 0.25},
}
RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "small"
ALGORITHMS = ("dpo", "kto", "cpo", "simpo", "orpo")
Row = dict[str, Any]


def toy_rows(count: int = 40) -> list[Row]:
    """The chosen response counts coins, the rejected one cards, whatever the question."""
    return [
        {
            "prompt": f"eva has {3 + n % 12} pens . buys {2 + n // 12} . how many ?",
            "chosen": "many coins",
            "rejected": "many cards",
        }
        for n in range(count)
    ]


class World:
    """Recipes and data in a folder of their own, and what their runs said."""

    def __init__(self, folder: Path, rows: list[Row] | None = None):
        self.folder, self.run = folder, folder / "run"
        self.events: list[Event] = []
        self.data = self.write("pairs.jsonl", rows or toy_rows())

    def write(self, name: str, rows: list[Row]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def recipe(self, algorithm: Any, changes: Row | None = None, run: str = "run", **model: Any) -> Any:
        self.run = self.folder / run
        stage = STAGE | {
            "algorithm": algorithm,
            "data": {"source": str(self.data), "cache": str(self.folder / "cache")},
        }
        content = {
            "run": {"dir": str(self.run), "seed": 3, "threads": 1, "device": "cpu", "tensorboard": False},
            "model": {"tiny": {"hidden": 32, "layers": 2, "feed_forward": 48, "context": 96}, **model},
            "format": {"name": "r1_zero", "preamble": False},
            "stages": {"prefer": stage | (changes or {})},
        }
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return load_recipe(path)

    def train(self, algorithm: Any, changes: Row | None = None, run: str = "run", **model: Any) -> list[Row]:
        """Rows of metrics of a whole run, without timings."""
        self.events = []
        assert train(self.recipe(algorithm, changes, run, **model), sink=self.events.append) == 0
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if key != "timings"} for row in rows]

    def said(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Said)]

    def scored(self) -> int:
        """Sequences that the reference was asked about."""
        done = [event for event in self.events if isinstance(event, Progressed) and event.what == "reference"]
        return done[-1].total if done else 0


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


def test_rows_of_metrics_and_the_best_checkpoint(world: World) -> None:
    rows = world.train("dpo", {"steps": 6, "validation": {"share": 0.25, "every": 2}})
    names = {f"{kind}/{side}" for kind in ("rewards", "logps") for side in ("chosen", "rejected")}
    names |= {"loss", "rewards/margins", "rewards/accuracies", "kl"}
    assert all(names <= row.keys() for row in of(rows, "train"))
    assert all({f"validation/{name}" for name in names} <= row.keys() for row in of(rows, "eval"))
    first = of(rows, "train")[0]
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-5), "policy and reference begin alike"
    assert (first["rewards/margins"], first["kl"]) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert [row["step"] for row in of(rows, "eval")] == [2, 4, 6]
    best = min(of(rows, "eval"), key=lambda row: row["validation/loss"])
    store = world.run / "stages" / "prefer" / "checkpoints"
    assert json.loads((store / "best.json").read_text()) == {"step": best["step"], "score": best["validation/loss"]}
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
    assert "prefer: dropout is off in preference optimisation" in world.said()
    assert dropped == plain


def test_squared_mass_is_the_sum_of_squared_probabilities() -> None:
    policy = in_float64(tiny_policy())
    items = trajectories((9, 14, 6, 11))
    batch = TokenBatch.build(items, range(4), CPU, torch.float64)
    found, _ = SquaredMass(policy).logprobs(batch, temperature=0.7)
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
    assert all(one.chosen_T.tolist() == [False, False, True, True] for one in found)
    assert mismatched([example(10, 20), example(10, 21)], 90) == []
    assert [len(one) for one in mismatched([example(10, 20), example(11, 21)], 3)] == [3, 3]


# --- data ------------------------------------------------------------------------------------------------------------


def conversation(asked: str, said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


SHAPES: dict[str, Callable[[Row], Row]] = {
    "implicit": lambda row: {side: f"{row['prompt']} {row[side]}" for side in ("chosen", "rejected")},
    "conversations": lambda row: {side: conversation(row["prompt"], row[side]) for side in ("chosen", "rejected")},
    "prompt and messages": lambda row: {
        "prompt": conversation(row["prompt"], "")[:1],
        **{side: conversation("", row[side])[1:] for side in ("chosen", "rejected")},
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_every_shape_are_the_same_pairs(world: World, shape: str) -> None:
    rows = [row | {"chosen": "coins " + row["chosen"], "rejected": "cards"} for row in toy_rows(12)]
    world.data = world.write("plain.jsonl", rows)
    plain = world.train("dpo", {"steps": 2}, "plain")
    world.data = world.write("shaped.jsonl", [SHAPES[shape](row) for row in rows])
    assert world.train("dpo", {"steps": 2}, "shaped") == plain


def test_pairs_are_judged_responses_too(world: World) -> None:
    """KTO on pairs equals KTO on the same responses with labels."""
    pairs = world.train("kto", {"shuffle": False, "validation": {}}, "pairs")
    judged = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in toy_rows()
        for side in ("chosen", "rejected")
    ]
    world.data = world.write("judged.jsonl", judged)
    assert world.train("kto", {"shuffle": False, "validation": {}}, "judged") == pairs


@pytest.mark.parametrize(
    ("algorithm", "row", "sentence"),
    [
        ("dpo", {"prompt": "eva ?", "chosen": "3"}, r"pairs.jsonl:3: .*'rejected' is missing"),
        ("dpo", {"prompt": "eva ?", "chosen": "3", "rejected": " "}, r"pairs.jsonl:3: .*'rejected'"),
        ("dpo", {"chosen": "3 pens", "rejected": "4 pens"}, r"pairs.jsonl:3: .*begin differently"),
        ("orpo", {"prompt": "eva ?", "chosen": 3, "rejected": "4"}, r"pairs.jsonl:3: .*'chosen'"),
        ("kto", {"prompt": "eva ?", "chosen": "3"}, r"pairs.jsonl:3: .*'rejected' is missing"),
    ],
)
def test_a_wrong_row_gets_one_sentence(world: World, algorithm: str, row: Row, sentence: str) -> None:
    world.data = world.write("pairs.jsonl", [*toy_rows(2), row])
    with pytest.raises(UserError, match=sentence):
        world.train(algorithm)


def test_rows_of_another_kind_get_one_sentence(world: World) -> None:
    world.data = world.write("pairs.jsonl", [{"question": "eva ?", "answer": "3"}])
    with pytest.raises(UserError, match=r"pairs\.jsonl:1: this row lacks a chosen and a rejected response"):
        world.train("dpo")
    with pytest.raises(UserError, match=r"pairs\.jsonl:1: this row lacks a labelled response"):
        world.train("kto")


def test_a_pair_that_is_too_long_is_left_out_whole(world: World) -> None:
    world.data = world.write("pairs.jsonl", [*toy_rows(8), toy_rows(1)[0] | {"rejected": "pens " * 90}])
    world.train("dpo", {"validation": {}})
    assert "1 of 9 examples have a sequence longer than 96 tokens and were left out" in world.said()


def test_a_pair_that_prefers_nothing_is_left_out(world: World) -> None:
    same = toy_rows(1)[0] | {"rejected": "many coins "}
    world.data = world.write("pairs.jsonl", [*toy_rows(8), same])
    world.train("dpo", {"validation": {}})
    assert "1 of 9 pairs have the same text as 'chosen' and 'rejected' and were left out" in world.said()
    world.data = world.write("pairs.jsonl", [same, same])
    with pytest.raises(UserError, match=r"pairs\.jsonl:1: 'chosen' and 'rejected' are the same in every row"):
        world.train("dpo", run="same")


# --- pairs from a journal --------------------------------------------------------------------------------------------


def sample(key: int, number: int, reward: float | None, ids: list[int], **more: Any) -> Sample:
    return Sample(
        key=("rl", 0, key),
        sample=number,
        problem_id=f"p{key}",
        prompt=np.array([3, 10 + key, 5]),
        ids=np.array(ids),
        logprobs=np.zeros(len(ids)),
        kept=np.zeros(len(ids)),
        finish=more.pop("finish", "stop"),
        reward=reward,
        **more,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "earlier" / "stages" / "rl" / "journal" / "step-000001.jsonl"
    book = Journal(path)
    for one in (
        sample(0, 0, 0.5, [20, 1]),
        sample(0, 1, 1.0, [21, 22, 1]),
        sample(0, 2, 0.0, [23, 1]),
        sample(0, 3, None, [24, 1]),
        sample(0, 4, 0.75, [25, 1]),
        sample(1, 0, 1.0, [26, 1]),
        sample(1, 1, 1.0, [27, 1]),
        sample(2, 0, 1.0, [28, 1], finish="cancelled"),
        sample(2, 1, 0.0, [29, 1]),
    ):
        book.append(one)
    book.finish()
    book.close()
    (tmp_path / "earlier" / "recipe.yaml").write_text("")
    (tmp_path / "earlier" / "metrics.jsonl").write_text('{"step": 1}\n')
    return path


def test_best_against_worst_with_the_ids_that_were_sampled(journal: Path, tmp_path: Path) -> None:
    for place in (journal, journal.parent, tmp_path / "earlier"):
        (pair,) = journal_pairs(place, JournalOptions())
        assert pair.prompt.tolist() == [3, 10, 5] and pair.signs == (1, -1) and pair.problem_id == "p0"
        assert [ids.tolist() for ids in pair.responses] == [[21, 22, 1], [23, 1]]
    pairs = journal_pairs(journal, JournalOptions(per_group=4))
    assert [[ids.tolist() for ids in pair.responses] for pair in pairs] == [[[21, 22, 1], [23, 1]], [[25, 1], [20, 1]]]
    assert len(journal_pairs(journal, JournalOptions(per_group=4, gap=0.5))) == 1


def test_a_journal_without_pairs_gets_one_sentence(journal: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no group of samples .* differ by more than 1;"):
        journal_pairs(journal, JournalOptions(gap=1.0))
    with pytest.raises(UserError, match=r"there is no journal in .*nowhere"):
        journal_pairs(tmp_path / "nowhere", JournalOptions())


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("[1]", "is not an object"),
        ("5", "is not an object"),
        ('"end"', "is not an object"),
        ("{", "is not JSON"),
        ('{"version": 1}', "lacks 'prompt'"),
        ('{"step": 1}', "not of version 1"),
    ],
)
def test_a_file_that_is_no_journal_gets_one_sentence(journal: Path, row: str, sentence: str) -> None:
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:2], row, *lines[2:], ""]))
    for read in (lambda: journal_pairs(journal, JournalOptions()), lambda: Journal(journal)):
        with pytest.raises(UserError, match=rf"step-000001\.jsonl:3: this row .*{sentence}"):
            read()


@pytest.mark.parametrize(
    "change", [{"ids": "AA=="}, {"ids": 3}, {"ids": ""}, {"reward": "1"}, {"timings": None}], ids=str
)
def test_a_damaged_sample_gets_one_sentence(journal: Path, change: Row) -> None:
    first, *others = journal.read_text().splitlines()
    journal.write_text("\n".join([json.dumps(json.loads(first) | change), *others, ""]))
    with pytest.raises(UserError, match=r"step-000001\.jsonl:1: this row of the journal is not a sample"):
        journal_pairs(journal, JournalOptions())


def test_ids_of_another_tokenizer_get_one_sentence(world: World, tmp_path: Path) -> None:
    book = Journal(tmp_path / "other.jsonl")
    for one in (sample(0, 0, 1.0, [20, 1]), sample(0, 1, 0.0, [100_000, 1])):
        book.append(one)
    book.close()
    with pytest.raises(UserError, match=r"holds the token id 100000, but the model has \d+ tokens; take the journal"):
        world.train("dpo", {"data": {"source": f"journal:{book.path}"}, "validation": {}})


def test_a_journal_is_a_source(world: World, journal: Path) -> None:
    plan = describe(load_recipe(RECIPES / "own_samples_dpo.yaml"))
    assert plan.count("the samples in this run") == 1
    for algorithm, count in (("dpo", 1), ("kto", 2)):
        world.train(algorithm, {"data": {"source": f"journal:{journal}"}, "validation": {}}, f"on-{algorithm}")
        done = json.loads((world.run / "stages" / "prefer" / "done.json").read_text())
        assert done["examples"] == count


@pytest.mark.parametrize("place", ["data", "validation.data"])
def test_samples_of_the_run_need_a_stage_that_samples(place: str, tmp_path: Path) -> None:
    stages = yaml.safe_load((RECIPES / "own_samples_dpo.yaml").read_text())["stages"]
    path = tmp_path / "recipe.yaml"
    late = {name: stages[name] for name in ("sft", "dpo", "sample")}
    if place == "validation.data":
        late["dpo"] |= {"data": {"source": "journal:runs/x"}, "validation": {"data": {"source": "journal"}}}
    path.write_text(yaml.safe_dump({"stages": late}, sort_keys=False))
    with pytest.raises(UserError, match=rf"recipe\.yaml:\d+: stages\.dpo\.{place}\.source: no stage before this one"):
        load_recipe(path)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "changes", "sentence"),
    [
        ({"name": "dop"}, {}, "did you mean 'dpo'"),
        ({"name": "dpo", "loss": "hinge", "label_smoothing": 0.1}, {}, "label_smoothing has no effect on hinge"),
        ({"name": "dpo", "loss": "aot", "divergence": "js"}, {}, "divergence: js is not defined for aot"),
        ({"name": "dpo", "reference_free": True, "divergence": "js"}, {}, "there is no divergence"),
        ({"name": "cpo", "loss": "ipo", "label_smoothing": 0.1}, {}, "label_smoothing has no effect on ipo"),
        ("kto", {"batch": {"examples": 1}}, "write `examples: 2` or more"),
        ("dpo", {"epochs": 1}, "give epochs or steps, not both"),
        ("dpo", {"data": {"mix": [{"source": "journal:x"}]}}, "a journal cannot be mixed"),
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
