"""What the preference stage learns from: rows of every shape, and pairs from a journal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from lemma.core.errors import UserError
from lemma.data.data_options import DataOptions
from lemma.data.load_rows import judgements, load_preferences
from lemma.formats.boxed import Boxed
from lemma.models.tiny import tiny_tokenizer
from lemma.planning.plan_words import describe
from lemma.recipe import load_recipe
from lemma.rollouts.episode import Episode
from lemma.rollouts.journal import Journal
from lemma.stages.preference.examples import journal_pairs, of_row, prepare
from lemma.stages.preference.preference_options import JournalOptions, PreferenceOptions
from tests.stages.preference_world import RECIPES, Row, World, toy_rows


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


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
        (
            "dpo",
            {"prompt": [{"role": "system", "content": "be nice"}], "chosen": "3", "rejected": "4"},
            r"pairs.jsonl:3: the prompt has no message of the user",
        ),
        ("dpo", toy_rows(1)[0] | {"rejected": "<eos>"}, r"pairs.jsonl:3: .*an empty response .*; remove the row"),
        ("kto", toy_rows(1)[0] | {"rejected": "<eos>"}, r"pairs.jsonl:3: .*an empty response .*; remove the row"),
    ],
)
def test_a_wrong_row_gets_one_sentence(world: World, algorithm: str, row: Row, sentence: str) -> None:
    world.data = world.write("pairs.jsonl", [*toy_rows(2), row])
    with pytest.raises(UserError, match=sentence):
        world.train(algorithm)


def test_a_row_that_the_chat_template_refuses_gets_one_sentence(world: World) -> None:
    data = DataOptions(source=str(world.write("pairs.jsonl", toy_rows(4))))
    tokenizer, fmt = tiny_tokenizer(), Boxed(system="", template="tokenizer")
    third = load_preferences(data, 0)[2]
    for refused, sentence in (
        (
            f"'{third.problem.question}' in messages[0]['content']",
            r"pairs\.jsonl:3: the tokenizer's chat template refuses",
        ),
        ("true", "^the tokenizer's chat template refuses problem .*: not this one"),
    ):
        tokenizer.chat_template = f"{{% if {refused} %}}{{{{ raise_exception('not this one') }}}}{{% endif %}}"
        with pytest.raises(UserError, match=sentence):
            of_row(fmt, tokenizer, data, judgements(third))


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


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_a_pair_that_prefers_nothing_is_left_out(world: World, algorithm: str) -> None:
    same = toy_rows(1)[0] | {"rejected": "many coins "}
    world.data = world.write("pairs.jsonl", [*toy_rows(8), same])
    world.train(algorithm, {"validation": {}})
    assert "1 of 9 examples hold the same response twice and were left out" in world.said()
    done = json.loads((world.run / "stages" / "prefer" / "done.json").read_text())
    assert done["examples"] == {"dpo": 8, "kto": 16}[algorithm]
    world.data = world.write("pairs.jsonl", [same, same])
    with pytest.raises(UserError, match=r"pairs\.jsonl:1: the two responses of every pair are the same"):
        world.train(algorithm, run="same")


@pytest.mark.parametrize("how", ["share", "data"])
def test_held_out_prompts_are_measured_too(world: World, how: str) -> None:
    """Long prompts among the rows change nothing, neither what is learnt nor what is held out."""
    results = []
    for name, more in (("short", []), ("mixed", [row | {"prompt": "pens " * 30} for row in toy_rows(4)])):
        data = {"source": str(world.write(f"{name}.jsonl", [*toy_rows(8), *more])), "prompt_length": {"max_tokens": 25}}
        changes = {"data": data, "validation": {"share": 0.5}} if how == "share" else {"validation": {"data": data}}
        results.append(world.train("dpo", {"steps": 1, **changes}, name))
    assert results[0] == results[1] and "validation/loss" in results[0][0]


# --- pairs from a journal --------------------------------------------------------------------------------------------


def sample(key: int, number: int, reward: float | None, ids: list[int], **more: Any) -> Episode:
    return Episode.at_once(
        key=("rl", 0, key),
        sample=number,
        problem_id=f"p{key}",
        context=np.array([3, 10 + key, 5]),
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


def test_a_problem_and_its_variations_are_held_out_together(tmp_path: Path) -> None:
    """Also where the journal has no pair of the original, as of the second problem."""
    book = Journal(tmp_path / "samples.jsonl")
    names = ["p0", "p0~1", "p0~2", "p1~1", "p1~2", "p1~10", "p2", "p3"]
    for place, name in enumerate(names):
        for number in (0, 1):
            book.append(replace(sample(place, number, float(number), [20 + number, 1]), problem_id=name))
    book.finish()
    book.close()
    options = PreferenceOptions.model_validate(
        {"kind": "preference", "data": {"source": f"journal:{book.path}"}, "validation": {"share": 0.4}}
    )
    for seed in range(6):
        stage: Any = SimpleNamespace(seed=seed, name="prefer", say=print, warn=print)
        learnt, held = prepare(stage, options, Boxed(), tiny_tokenizer(), limit=96)
        sides = [{example.problem_id.partition("~")[0] for example in side} for side in (learnt, held)]
        assert len(learnt) + len(held) == len(names) and sides[0] and sides[1]
        assert sides[0].isdisjoint(sides[1]), seed


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
        ('{"version": 1}', "lacks 'ids'"),
        ('{"version": 2}', "lacks 'turns'"),
        ('{"version": 2, "turns": []}', "is not an episode"),
        ('{"step": 1}', "no version of the journal that is known here"),
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
    row = json.loads(first)
    changed = row | change if "reward" in change else row | {"turns": [row["turns"][0] | change]}
    journal.write_text("\n".join([json.dumps(changed), *others, ""]))
    with pytest.raises(UserError, match=r"step-000001\.jsonl:1: this row of the journal is not an episode"):
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


@pytest.mark.parametrize(
    ("amount", "learnt"), [({}, 6), ({"count": 2}, 2), ({"fraction": 0.5}, 3), ({"count": 8}, 8)], ids=str
)
def test_count_and_fraction_are_of_the_pairs_of_a_journal(
    world: World, tmp_path: Path, amount: Row, learnt: int
) -> None:
    book = Journal(tmp_path / "six.jsonl")
    for key in range(6):
        for number, reward in enumerate((1.0, 0.0)):
            book.append(sample(key, number, reward, [20 + number, 1]))
    book.close()
    world.train("dpo", {"steps": 1, "data": {"source": f"journal:{book.path}", **amount}, "validation": {}})
    assert json.loads((world.run / "stages" / "prefer" / "done.json").read_text())["examples"] == learnt


def test_equal_samples_are_no_pair(world: World, tmp_path: Path) -> None:
    """Such as where the same text was graded twice, and once in vain."""
    for name, others in (("one", [[21, 1], [20, 1]]), ("all", [[20, 1], [20, 1]])):
        book = Journal(tmp_path / f"{name}.jsonl")
        for key, ids in enumerate(others):
            book.append(sample(key, 0, 1.0, [20, 1]))
            book.append(sample(key, 1, 0.0, ids))
        book.close()
    for algorithm, count in (("dpo", 1), ("kto", 2)):
        world.train(algorithm, {"data": {"source": f"journal:{tmp_path / 'one.jsonl'}"}, "validation": {}}, algorithm)
        assert "1 of 2 examples hold the same response twice and were left out" in world.said()
        assert json.loads((world.run / "stages" / "prefer" / "done.json").read_text())["examples"] == count
    with pytest.raises(UserError, match="the two responses of every pair are the same"):
        world.train("dpo", {"data": {"source": f"journal:{tmp_path / 'all.jsonl'}"}, "validation": {}}, "all")


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
