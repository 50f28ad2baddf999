"""What a speaker and those who learn say to each other, without processes: nobody waits longer than he must, and what
went wrong for one leaves nothing behind for the others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection, Listener
from typing import Any

import numpy as np
import pytest
import torch

from lemma.cluster import speaker_link
from lemma.cluster.speaker import Speaker
from lemma.core.ranks import RankWorld, SpeakerLink, is_stop_asked, joined
from lemma.engines.engine_options import NativeOptions
from lemma.engines.generator_engine import GeneratorEngine
from lemma.engines.protocol import Completion, Request, Sampling
from lemma.engines.speaker_messages import (
    Begin,
    End,
    Failed,
    Heartbeat,
    Load,
    More,
    SpeakerReady,
    SpokenSample,
    StopAsked,
    Unload,
)
from lemma.engines.weight_broadcast import layout_of
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions
from lemma.models.policy import Policy
from tests.cluster.test_rl_ranks import MODEL

CONTEXT = MODEL["tiny"]["context"]


def asked(name: str, tokens: int = 8) -> Request:
    return Request((name,), np.array([5, 6, 7]), Sampling(max_tokens=tokens, ignore_eos=True))


@pytest.fixture(scope="module")
def load() -> Load:
    model = ModelOptions.model_validate(MODEL)
    layout = layout_of(build_policy(model, torch.device("cpu"), 0))
    return Load(model, None, "cpu", 0, NativeOptions(), None, layout, 1, is_deterministic=False)


class Served:
    """A speaker whose turns the test takes, and the ends of two that learn. It says at every look that it works."""

    def __init__(self, load: Load):
        self.ends, its = zip(*(Pipe() for _ in range(2)), strict=True)
        link = SpeakerLink([0, 1], list(its), deadline=0.0)
        self.speaker = Speaker(RankWorld(2, 3, link=link, is_speaker=True), lambda event: None)
        self.ends[0].send(load)
        self.turn()
        assert isinstance(self.ends[0].recv(), SpeakerReady)

    def turn(self) -> None:
        """Hear all that was said, and do it."""
        speaker = self.speaker
        while any(peer.poll() for peer in speaker._peers):
            speaker._hear(0.0)
        while speaker._orders:
            speaker._obey(*speaker._orders.popleft())
        speaker._work()

    def said_to(self, number: int) -> list[Any]:
        """All that it has said to one of those that learn."""
        self.speaker._outboxes[self.speaker._peers[number]].put("that is all")
        return list(iter(self.ends[number].recv, "that is all"))

    def spoken_to(self, number: int) -> list[str]:
        """The names of the requests whose samples it has said."""
        return [word.completion.key[0] for word in self.said_to(number) if isinstance(word, SpokenSample)]


def test_who_waits_for_another_hears_that_the_speaker_works(load: Load) -> None:
    served = Served(load)
    for number, end in enumerate(served.ends):
        end.send(Begin(1, [asked(f"of {number}")], is_whole=True, resets_prefix_cache=True))
    served.turn()
    first, *others = served.said_to(1)
    assert isinstance(first, Heartbeat)
    assert [word.completion.key for word in others if isinstance(word, SpokenSample)] == [("of 1",)]


def test_a_request_that_cannot_be_served_leaves_nothing_behind(load: Load) -> None:
    """The first request was in the engine already when the second one was refused."""
    served = Served(load)
    served.ends[0].send(Begin(1, [asked("good"), asked("good")], is_whole=False, resets_prefix_cache=True))
    served.turn()
    (failed,) = (word for word in served.said_to(0) if not isinstance(word, Heartbeat))
    assert isinstance(failed, Failed) and failed.session == 1
    served.ends[0].send(End(1))
    served.ends[1].send(Begin(1, [asked("other")], is_whole=True, resets_prefix_cache=True))
    served.turn()
    assert served.spoken_to(1) == ["other"] and served.said_to(0) == []


def test_what_flies_is_served_together_and_waits_for_nobody(load: Load) -> None:
    """Neither for another learner's end nor for its own; a session in the old way comes before."""
    served = Served(load)
    served.ends[0].send(Begin(1, [asked("a"), asked("b")], False, False, is_partial=True))
    served.ends[1].send(Begin(1, [asked("c")], False, False, is_partial=True))
    served.turn()
    assert sorted(served.spoken_to(0)) == ["a", "b"] and served.spoken_to(1) == ["c"]
    served.ends[1].send(Begin(2, [], False, True))
    served.ends[0].send(More(1, [asked("d")]))
    served.turn()
    assert served.spoken_to(0) == [], "the other has the speaker for itself"
    served.ends[1].send(End(2))
    served.turn()
    assert served.spoken_to(0) == ["d"]


def test_a_word_that_comes_after_the_engine_has_gone_is_forgotten(load: Load) -> None:
    served = Served(load)
    served.ends[0].send(Unload())
    served.turn()
    served.ends[1].send(Begin(1, [asked("late")], is_whole=True, resets_prefix_cache=True))
    served.turn()
    assert served.said_to(1) == [] and not served.speaker._is_busy


def test_strangers_at_the_door_of_a_speaker_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaker_link, "GREET_SECONDS", 3)
    listener = Listener(("127.0.0.1", 0), backlog=4)
    with socket.create_connection(listener.address), socket.create_connection(listener.address) as rude:
        rude.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with ThreadPoolExecutor() as pool:
            second, first = (pool.submit(speaker_link._greet, listener.address, b"key", rank) for rank in (1, 0))
            accepted = speaker_link._accepted(listener, b"key", 2)
    for number, connection in enumerate(accepted):
        connection.send(number)
    assert first.result().recv() == 0 and second.result().recv() == 1


# --- the learner's side --------------------------------------------------------------------------------------------


@pytest.fixture
def spoken(load: Load) -> Iterator[tuple[GeneratorEngine, Connection]]:
    """An engine, and the end at which its speaker sits: the test, which says nothing by itself."""
    mine, its = Pipe()
    link = SpeakerLink([1], [mine])
    policy: Policy = build_policy(load.model, torch.device("cpu"), 0)
    with joined(RankWorld(link=link)):
        its.send(SpeakerReady("native", CONTEXT, None, None, updates_in_flight=True))
        engine = GeneratorEngine(policy, link, load, lambda seconds: None, is_partial=True)
        assert isinstance(its.recv(), Load)
        yield engine, its
        engine.close()


def test_a_stop_does_not_wait_for_a_speaker(spoken: tuple[GeneratorEngine, Connection]) -> None:
    engine, its = spoken
    engine.submit(asked("one"))
    engine.drop([("one",)])
    begin, end = its.recv(), its.recv()
    assert isinstance(begin, Begin) and begin.is_partial and isinstance(end, End) and end.session == begin.session
    assert list(engine.completions()) == []


def test_speakers_begin_with_what_was_asked_last_while_the_learner_learns(
    spoken: tuple[GeneratorEngine, Connection],
) -> None:
    """A sample came, the next request was submitted, and the learner had what it wanted."""
    engine, its = spoken
    engine.submit(asked("one"))
    nothing = np.zeros(0, dtype=np.float32)
    finished = Completion(("one",), 0, nothing.astype(np.int32), nothing, nothing, "length", 0)
    its.send(SpokenSample(engine._only.number, finished, 0.0))
    for completion in engine.completions():
        assert completion.key == ("one",)
        engine.submit(asked("two"))
        break
    begin, more = its.recv(), its.recv()
    assert isinstance(begin, Begin) and [request.key for request in begin.requests] == [("one",)]
    assert isinstance(more, More) and [request.key for request in more.requests] == [("two",)]


def test_a_speaker_that_says_nothing_is_named(spoken: tuple[GeneratorEngine, Connection]) -> None:
    engine, _ = spoken
    engine._link.deadline = 0.0
    engine.submit(asked("one"))
    with pytest.raises(RuntimeError, match="rank 1 said nothing for 0 s"):
        next(engine.completions())


def test_a_speaker_that_is_asked_to_stop_is_heard_at_the_end_of_any_step(
    spoken: tuple[GeneratorEngine, Connection],
) -> None:
    engine, its = spoken
    assert not is_stop_asked()
    its.send(StopAsked())
    assert is_stop_asked(), "while nothing is generated"
    engine.close()
    link = engine._link
    link.look = lambda: speaker_link._look(link)
    with joined(RankWorld(link=link)):
        assert not is_stop_asked()
        its.send(StopAsked())
        assert is_stop_asked(), "in a stage without an engine"
