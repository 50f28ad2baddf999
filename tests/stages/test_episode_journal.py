"""Episodes of a journal: good ones are imitated, good and bad ones of a problem compared, and replies never learnt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lemma.algorithms.preference import PREFERENCE_ALGORITHMS
from lemma.core.errors import UserError
from lemma.rollouts import Episode, Journal
from lemma.stages.preference.examples import Example, journal_pairs
from lemma.stages.preference.preference_loop import as_trajectories
from lemma.stages.preference.preference_options import JournalOptions
from tests.stages.game_world import episodes_of, game_recipe, game_stage, measured, run_games

LEARN: dict[str, Any] = {"kind": "supervised", "steps": 60, "batch": {"sequences": 16}, "optim": {"lr": 3e-3}}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that imitated random games, then played some."""
    sft = LEARN | {"data": {"source": "higher_lower", "guessing": {"numbers": 8, "turns": 3, "count": 320}}}
    sample = game_stage(algorithm={"name": "grpo", "group_size": 8}, batch={"problems": 8}, optim={"lr": 0.0})
    return run_games(tmp_path_factory.mktemp("played"), sft=sft, rl=sample)


@pytest.fixture(scope="module")
def journal(played: Path) -> Path:
    (path,) = (played / "stages/rl/journal").iterdir()
    return path


def test_good_episodes_of_another_run_are_imitated(played: Path, tmp_path: Path) -> None:
    good = {tuple(one.trajectories()[0].ids_T) for one in episodes_of(played, "rl") if one.reward == 1.0}
    assert 4 < len(good) < 40 and any(len(ids) > 5 for ids in good)
    again = LEARN | {"data": {"source": f"journal:{played}"}, "steps": 2}
    run = run_games(tmp_path, sft=again)
    done = json.loads((run / "stages" / "sft" / "done.json").read_text())
    assert (done["examples"], done["tokens"]) == (len(good), sum(map(len, good)))


def test_a_stage_imitates_the_stage_before_and_likes_it_better(tmp_path: Path) -> None:
    rl = game_stage(batch={"problems": 8}, algorithm={"name": "grpo", "group_size": 8}, optim={"lr": 0.0})
    imitate = LEARN | {"data": {"source": "journal"}, "validation": {"share": 0.25}}
    imitate["journal"] = {"least_reward": 0.0, "per_problem": 2}
    run = run_games(tmp_path, rl=rl, again=imitate)
    rows = measured(run, "again")
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": {"source": "journal"}}, "no stage before this one samples"),
        ({"data": {"source": "journal:x"}, "turns": "last"}, "turns has no effect on the episodes of a journal"),
        ({"data": {"source": "journal:x"}, "packing": "stream", "max_length": 32}, "stay whole and in memory"),
        ({"data": {"source": "journal:x", "split": "test"}}, "split has no effect on the journal"),
        ({"journal": {"least_reward": 0.5}}, "without `source: journal`"),
    ],
)
def test_what_a_journal_cannot_do_is_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=sentence):
        game_recipe(tmp_path, sft=LEARN | options)


def test_a_threshold_that_nothing_meets_is_named(played: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no sample in .* has a reward of 2 or more; lower `journal.least_reward`"):
        run_games(tmp_path, sft=LEARN | {"data": {"source": f"journal:{played}"}, "journal": {"least_reward": 2}})


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_pairs_hold_whole_episodes_and_learn_what_was_said(played: Path, journal: Path) -> None:
    by_ids = {(one.problem_id, *one.trajectories()[0].ids_T): one for one in episodes_of(played, "rl")}
    pairs = journal_pairs(journal, JournalOptions(per_group=4))
    several = 0
    for pair in pairs:
        good, bad = (by_ids[pair.problem_id, *pair.prompt, *ids] for ids in pair.responses)
        assert (good.reward, bad.reward) == (1.0, 0.0)
        for one, mask, ids in zip((good, bad), pair.said, pair.responses, strict=True):
            assert ids[mask].tolist() == one.ids.tolist()
            assert mask.sum() == one.tokens < len(ids) or len(one.turns) == 1
            several += len(one.turns) > 1
    assert several > 4


@pytest.mark.parametrize("name", ["dpo", "kto", "simpo", "orpo", "cpo"])
def test_no_algorithm_learns_what_was_heard(name: str, journal: Path) -> None:
    algorithm = PREFERENCE_ALGORITHMS[name]()
    pairs = journal_pairs(journal, JournalOptions())
    examples: list[Example] = pairs if algorithm.paired else [one for pair in pairs for one in pair.single()]
    made = iter(as_trajectories(examples, algorithm))
    for example in examples:
        for response, said in zip(example.responses, example.said, strict=True):
            one, start = next(made), len(example.prompt)
            assert one.ids_T[start:].tolist() == response.tolist() and one.loss_mask_T[start:].tolist() == said.tolist()
            if "response" in one.token_fields:
                assert one.token_fields["response"].tolist() == [0.0] * start + said.astype(float).tolist()
    assert sum(not said.all() for example in examples for said in example.said) > 4


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_model_learns_to_tell_good_episodes_from_bad(name: str, played: Path, tmp_path: Path) -> None:
    stage = {
        "kind": "preference", "algorithm": name, "steps": 20, "optim": {"lr": 2e-3}, "batch": {"examples": 8},
        "data": {"source": f"journal:{played}", "cache": str(tmp_path / "cache")}, "journal": {"per_group": 4},
    }  # fmt: skip
    rows = measured(run_games(tmp_path, **{name: stage}), name)
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["rewards/margins"] > 0.02


def test_episodes_that_rewrite_their_history_are_left_out_of_pairs(played: Path, tmp_path: Path) -> None:
    (path,) = (played / "stages/rl/journal").iterdir()
    journal = Journal(tmp_path / "journal.jsonl")
    count = 0
    for one in episodes_of(played, "rl"):
        if len(one.turns) == 3 and one.reward == 0.0 and one.sample % 2:
            one, count = _rewritten(one), count + 1
        journal.append(one)
    journal.close()
    said: list[str] = []
    pairs = journal_pairs(journal.path, JournalOptions(per_group=8), say=said.append)
    assert 0 < len(pairs) < len(journal_pairs(path, JournalOptions(per_group=8)))
    assert said == [
        f"{count} episodes of {journal.path} rewrite their history, which no pair can hold, and were left out"
    ]


def _rewritten(episode: Episode) -> Episode:
    """The same, as if its last turn had been spoken behind a prompt of its own."""
    last = replace(episode.turns[-1], context=episode.context(2), extends=False)
    return replace(episode, turns=[*episode.turns[:-1], last])
