"""A teacher's episodes: LUFFY plays them again in the world, and imitation reads them as an episode would be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from lemma.core.types import Demonstration, Message, Problem
from lemma.data.data_options import DataOptions
from lemma.data.load_rows import load_demonstrations
from lemma.engines.protocol import Sampling
from lemma.environments import HigherLower
from lemma.formats import make_format
from lemma.formats.bridge import Bridge
from lemma.formats.encode import encode_demonstration, encode_learnt, encode_prompt
from lemma.formats.turns import encode_played, first_asked, said_ids
from lemma.models.tiny import tiny_tokenizer
from lemma.rewards import make_reward
from lemma.rollouts import SampleRequest, Scorer, World
from lemma.rollouts.teacher_traces import replayed
from tests.formats.tokenizers_made_here import THEIR_TEMPLATE, make_tokenizer
from tests.stages.game_world import (
    WORDS,
    bisection,
    episodes_of,
    game_recipe,
    game_stage,
    measured,
    run_games,
    write_rows,
)

REWRITING = """
from lemma.environments import Environment, Outcome, Observation

class Rewriting(Environment):
    turns = 0

    def step(self, said):
        self.turns += 1
        self.last = said.text
        anew = "again" if self.problem.golds[0] == "1" else None
        return Observation("higher", prompt=anew, done=self.turns == 2)

    def reset(self, problem, seed):
        self.problem = problem
        return []

    def score(self):
        return Outcome(float(len(self.last) % 3), True)
"""


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of LUFFY with a teacher who wins every game within three turns."""
    folder = tmp_path_factory.mktemp("luffy")
    rows = [{"messages": bisection(1, 7, secret, 3), "answer": str(secret)} for secret in range(1, 8)]
    data = {"source": str(write_rows(folder / "games.jsonl", rows))}
    luffy = {"name": "luffy", "group_size": 4}
    return run_games(folder, rl=game_stage(algorithm=luffy, data=data, steps=2))


def test_the_world_answers_a_teacher_and_says_what_it_was_worth(taught: Path) -> None:
    episodes = episodes_of(taught, "rl")
    teachers = [one for one in episodes if one.origin == "teacher"]
    assert len(episodes) == 32 and len(teachers) == 8
    assert all(one.sample == 0 and one.reward == 1.0 and one.verdict == "right" for one in teachers)
    tokenizer = tiny_tokenizer(WORDS)
    for one in teachers:
        wanted = bisection(1, 7, int(one.gold[0]), 3)
        assert [turn.text for turn in one.turns] == [said["content"] for said in wanted if said["role"] == "assistant"]
        heard = [said["content"] for said in wanted[1:] if said["role"] == "user"]
        assert [turn.heard for turn in one.turns] == [*heard, "right"]
        for turn, reply in zip(one.turns[1:], heard, strict=True):
            assert tokenizer.decode(turn.context).split() == ["<eos>", reply]
            assert turn.given == len(turn.ids) == 1 and turn.extends
        (trajectory,) = one.trajectories(with_turns=True)
        assert trajectory.token_fields["off"][trajectory.loss_mask_T].all()
        assert not trajectory.token_fields["off"][~trajectory.loss_mask_T].any()


def test_a_teachers_tokens_are_learnt_and_told_apart(taught: Path) -> None:
    for row in measured(taught, "rl"):
        assert row["off_policy/samples"] == 4.0 and row["off_policy/right"] == 1.0
        assert row["off_policy/prefix_share"] == 1.0 and 0 < row["off/share"] < 0.5
        assert row["updates"] == 1.0 and row["mismatch/max"] < 1e-5


@pytest.mark.parametrize("samples", [2, -1])
def test_several_samples_or_all_are_a_teachers(samples: int, tmp_path: Path) -> None:
    rows = [{"messages": bisection(1, 7, secret, 3), "answer": str(secret)} for secret in range(1, 8)]
    data = {"source": str(write_rows(tmp_path / "games.jsonl", rows))}
    luffy = {"name": "luffy", "group_size": 4, "prefix": {"samples": samples}, "sft_weight": 1.0}
    run = run_games(tmp_path, rl=game_stage(algorithm=luffy, data=data))
    teachers = [one for one in episodes_of(run, "rl") if one.origin == "teacher"]
    assert len(teachers) == 4 * (samples if samples > 0 else 4) and all(one.reward == 1.0 for one in teachers)
    (row,) = measured(run, "rl")
    assert row["off_policy/samples"] == len(teachers) and ("reward/mean" in row) == (samples > 0)


def test_where_some_episodes_rewrite_their_history_a_batch_can_be_used_again(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(REWRITING)
    world = {"name": "custom", "class": f"{tmp_path / 'world.py'}:Rewriting", "turns": 2}
    grpo = {"name": "grpo", "group_size": 4, "epochs": 3, "mini_batches": 2}
    run = run_games(tmp_path, rl=game_stage(environment=world, algorithm=grpo, batch={"problems": 8}))
    rewritten = {not one.turns[1].extends for one in episodes_of(run, "rl")}
    (row,) = measured(run, "rl")
    assert rewritten == {True, False} and row["updates"] == 6.0


def test_a_part_of_an_episode_is_refused(tmp_path: Path) -> None:
    algorithm = {"name": "luffy", "prefix": {"min": 0.5}}
    with pytest.raises(ValidationError, match="a teacher's episode is whole"):
        game_recipe(tmp_path, rl=game_stage(algorithm=algorithm))


# --- imitation -------------------------------------------------------------------------------------------------------

FORMATS = ["question_only", "r1_zero", "think_answer", "xml", "boxed", "working_out"]


def talk() -> Demonstration:
    said = [("user", "how many ?"), ("assistant", "5"), ("user", "higher"), ("assistant", "7"), ("user", "lower")]
    return Demonstration(Problem(tuple(Message(*one) for one in said), ("6",)), response="6", turns_from=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_is_encoded_as_an_episode_of_it_would_be_played(name: str) -> None:
    """Token for token, in every format: the same is said in a real game, which answers it the same."""
    tokenizer, fmt = tiny_tokenizer(WORDS), make_format(name)
    fmt.install(tokenizer)
    problem = first_asked(talk())
    assert [message.content for message in problem.messages] == ["how many ?"] and problem.golds == ("6",)
    ask = SampleRequest(("game",), problem, encode_prompt(fmt, problem, tokenizer))
    world = World(HigherLower(), Bridge.of(fmt, tokenizer, (), 16), context=512)
    said = {ask.key: said_ids(fmt, talk(), tokenizer)}
    scorer = Scorer(fmt, [make_reward("environment")], tokenizer)
    (episode,) = replayed([ask], said, Sampling(max_tokens=8), scorer, world)
    assert (episode.reward, episode.verdict, len(episode.turns)) == (1.0, "right", 3)
    (trajectory,) = episode.trajectories()
    encoded = encode_played(fmt, talk(), tokenizer)
    assert encoded.ids_T.tolist() == trajectory.ids_T.tolist()
    assert encoded.loss_mask_T.tolist() == trajectory.loss_mask_T.tolist() and encoded.trained_tokens == 6


def test_played_turns_are_one_sequence_where_the_template_writes_them_otherwise() -> None:
    tokenizer, fmt = tiny_tokenizer(WORDS), make_format("r1_zero")
    fmt.install(tokenizer)
    assert len(encode_learnt(fmt, talk(), tokenizer, "all", "response")) == 3
    (played,) = encode_learnt(fmt, talk(), tokenizer, "played", "response")
    assert played.trained_tokens == 6
    (everything,) = encode_learnt(fmt, talk(), tokenizer, "played", "all")
    assert everything.ids_T.tolist() == played.ids_T.tolist() and everything.trained_tokens == len(played) - 1
    single = Demonstration(Problem((Message("user", "how many ?"),)), response="5")
    assert (
        encode_played(fmt, single, tokenizer).ids_T.tolist()
        == encode_demonstration(fmt, single, tokenizer).ids_T.tolist()
    )


def test_what_is_heard_between_two_played_turns_keeps_its_roles() -> None:
    tokenizer, fmt = make_tokenizer(template=THEIR_TEMPLATE), make_format("own")
    said = [("user", "a"), ("assistant", "b"), ("tool", "c"), ("user", "d"), ("assistant", "e"), ("user", "f")]
    item = Demonstration(Problem(tuple(Message(*one) for one in said)), response="g", turns_from=0)
    text = tokenizer.decode(encode_played(fmt, item, tokenizer).ids_T, skip_special_tokens=False)
    assert "[tool] c\n[user] d\n[assistant] " in text and "[user] f\n[assistant] " in text, text
    assert text.count("[tool]") == 1


def test_built_in_games_show_the_format_and_no_way_to_win() -> None:
    options = DataOptions.model_validate({"source": "higher_lower", "guessing": {"numbers": 16, "count": 1600}})
    games = load_demonstrations(options, seed=0)
    assert [int(game.problem.golds[0]) for game in games[:17]] == [*range(1, 17), 1]
    right = np.mean([game.response == game.problem.golds[0] for game in games])
    assert abs(right - (1 - (15 / 16) ** GAME_TURNS)) < 0.03, "guesses that do not look at replies, with repetitions"
    replies = [said.content for game in games for said in game.problem.messages[2::2]]
    assert set(replies) == {"higher", "lower"}
    mute = load_demonstrations(
        DataOptions.model_validate({"source": "higher_lower", "guessing": {"count": 50, "mute": True}}), seed=0
    )
    assert {said.content for game in mute for said in game.problem.messages[2::2]} == {"lower"}


GAME_TURNS = 5
