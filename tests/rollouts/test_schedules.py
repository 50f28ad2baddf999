"""When turns are sent: all of a number together, or each as its reply is there; who is admitted; what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.core.types import Message, Problem
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Request, Sampling
from lemma.environments import CustomWorld
from lemma.formats import make_format
from lemma.formats.bridge import Bridge
from lemma.formats.encode import encode_prompt
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions, TinyOptions
from lemma.models.policy import Policy
from lemma.rewards import make_reward
from lemma.rollouts import Episode, SampleRequest, Scorer, World, play
from tests.environments.lingering import write_lingering
from tests.models.small import CPU
from tests.rollouts.episode_rows import row_of
from tests.rollouts.scripted import Scripted

FORMAT = make_format({"name": "r1_zero", "preamble": False})
SAMPLING = Sampling(max_tokens=6)


@pytest.fixture(scope="module")
def policy() -> Policy:
    tiny = TinyOptions(hidden=32, layers=1, feed_forward=32, heads=2, kv_heads=1, context=256)
    return build_policy(ModelOptions(tiny=tiny), CPU, 0, None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lingering(tmp_path_factory.mktemp("world"))


@pytest.fixture
def worlds(place: str, policy: Policy) -> Iterator[Any]:
    made: list[World] = []

    def make(options: dict[str, Any] | None = None, **more: Any) -> World:
        given = {"class": place, "options": options or {}, "turns": 4, "reply_tokens": 8, "workers": 0} | more
        bridge = Bridge.of(FORMAT, policy.tokenizer, (), 8)
        made.append(World(CustomWorld.model_validate(given), bridge, policy.context))
        return made[-1]

    yield make
    for world in made:
        world.close()


def asks(policy: Policy, count: int, n: int = 1, slow: int = -1) -> list[SampleRequest]:
    problems = [
        Problem((Message("user", f"eva has {number} pens ?"),), ("slow" if number == slow else "7",))
        for number in range(count)
    ]
    return [
        SampleRequest(("rl", 1, i), one, encode_prompt(FORMAT, one, policy.tokenizer), n)
        for i, one in enumerate(problems)
    ]


def scorer(policy: Policy) -> Scorer:
    return Scorer(FORMAT, [make_reward("environment")], policy.tokenizer)


def rows(episodes: list[Episode]) -> list[dict[str, Any]]:
    found = [row_of(one) for one in sorted(episodes, key=lambda one: one.order)]
    return [row | {"turns": [turn | {"timings": None} for turn in row["turns"]]} for row in found]


class Recording(NativeEngine):
    """Remembers what was asked, and how many tokens of prompts were computed."""

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        self.asked: list[Request] = []
        self.prefilled = 0
        prefill = self.runner.prefill

        def counted(parts: Any) -> Any:
            self.prefilled += sum(count for _, count in parts)
            return prefill(parts)

        self.runner.prefill = counted  # type: ignore[method-assign]

    def submit(self, request: Request) -> None:
        self.asked.append(request)
        super().submit(request)


def test_exact_depends_on_no_reply_s_time(policy: Policy, worlds: Any) -> None:
    """The same bits and the same order of requests, from the trainer's process and from two slow workers."""
    found = []
    for options, workers in (({}, 0), ({"most": 0.05}, 2)):
        engine = Recording(policy, 3)
        world = worlds(options, workers=workers)
        found.append((rows(list(play(engine, asks(policy, 4, 3), SAMPLING, scorer(policy), world=world))), engine))
    (first, one), (second, other) = found
    assert first == second and len({len(row["turns"]) for row in first}) > 1
    assert [request.key for request in one.asked] == [request.key for request in other.asked]
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(one.asked, other.asked, strict=True))


def test_every_prompt_is_what_the_journal_says(policy: Policy, worlds: Any) -> None:
    engine = Recording(policy, 3)
    episodes = list(play(engine, asks(policy, 3, 2), SAMPLING, scorer(policy), world=worlds(workers=1)))
    prompts = {request.key: request.prompt.tolist() for request in engine.asked}
    later = [(one, number) for one in episodes for number in range(1, len(one.turns))]
    assert len(later) > 4
    for episode, number in later:
        assert prompts[(*episode.key, episode.sample, "turn", number)] == episode.context(number).tolist()


def test_free_sends_a_turn_while_another_waits_for_its_reply(policy: Policy, worlds: Any) -> None:
    seen: dict[str, list[str]] = {}
    for schedule in ("free", "exact"):
        engine = Recording(policy, 3)
        world = worlds({"slow": 2.0}, schedule=schedule, workers=1, worker_calls=4, turns=3)
        work = asks(policy, 4, slow=0)
        episodes = list(play(engine, work, SAMPLING, scorer(policy), world=world))
        assert len(episodes) == 4
        turns = [request.key for request in engine.asked if "turn" in request.key]
        seen[schedule] = [f"{key[2]}.{key[-1]}" for key in turns]
    assert seen["exact"] == sorted(seen["exact"], key=lambda name: name[::-1])
    first = seen["free"].index("0.1")
    assert all(name in seen["free"][:first] for name in ("1.1", "2.1", "3.1"))
    assert any(name.endswith(".2") for name in seen["free"][:first]), "others are a turn ahead"
    assert sorted(seen["free"]) == sorted(seen["exact"])


@pytest.mark.parametrize("schedule", ["exact", "free"])
def test_no_more_worlds_than_may_be_open_and_the_oldest_first(
    policy: Policy, worlds: Any, schedule: str, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    world = worlds({"notes": str(notes)}, episodes=2, schedule=schedule)
    engine = Recording(policy, 3)
    episodes = list(play(engine, asks(policy, 6), SAMPLING, scorer(policy), world=world))
    assert len(episodes) == 6
    lines = notes.read_text().split()
    open_now = np.cumsum([1 if line[0] == "+" else -1 for line in lines])
    assert open_now.max() == 2 and open_now[-1] == 0
    assert [key[2] for key in (request.key for request in engine.asked) if "turn" not in key] == list(range(6))


def test_as_many_are_admitted_as_the_cache_holds(policy: Policy, worlds: Any, tmp_path: Path) -> None:
    work = asks(policy, 6)
    notes = tmp_path / "notes"
    world = worlds({"notes": str(notes)})
    longest = max(len(ask.prompt) for ask in work) + world.options.longest_episode(SAMPLING.max_tokens)
    engine = Recording(policy, 3, cache_tokens=3 * longest)
    assert len(list(play(engine, work, SAMPLING, scorer(policy), world=world))) == 6
    lines = notes.read_text().split()
    assert 2 <= np.cumsum([1 if line[0] == "+" else -1 for line in lines]).max() <= 3


def test_later_turns_compute_only_what_is_new(policy: Policy, worlds: Any) -> None:
    counts, found = [], []
    for reuse in (True, False):
        engine = Recording(policy, 3, share_prefixes=reuse)
        episodes = list(play(engine, asks(policy, 4), Sampling(max_tokens=40), scorer(policy), world=worlds()))
        found.append([[turn.ids.tolist() for turn in one.turns] for one in sorted(episodes, key=lambda e: e.order)])
        counts.append(engine.prefilled)
        whole = sum(len(one.context(number)) for one in episodes for number in range(len(one.turns)))
        # Blocks hold 16 tokens: of each turn's history at most the last block and the newest token are computed again.
        new = sum(len(turn.context) for one in episodes for turn in one.turns)
        again = sum(len(one.turns) - 1 for one in episodes) * 17
        assert engine.prefilled <= (new + again if reuse else whole)
    assert found[0] == found[1] and counts[1] == whole > 1.5 * counts[0]


def test_limits_of_an_episode(policy: Policy, worlds: Any) -> None:
    def say(request: Request, sample: int) -> str:
        return "so"

    (ask,) = asks(policy, 1)
    engine = Scripted(policy.tokenizer, say)
    room = len(ask.prompt) + 7
    world = worlds(episode_tokens=room)
    (episode,) = play(engine, [ask], Sampling(max_tokens=3), scorer(policy), world=world)
    assert sum(len(turn.context) + len(turn.ids) for turn in episode.turns) <= room
    late = worlds({"most": 0.02}, episode_seconds=1e-9)
    (episode,) = play(Scripted(policy.tokenizer, say), [ask], Sampling(max_tokens=3), scorer(policy), world=late)
    assert len(episode.turns) == 1 and episode.reward is not None
