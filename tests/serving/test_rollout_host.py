"""What a generation server does with the requests of several clients, without processes: whose turn it is, and what is
left of those that went wrong or went away."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
import torch
from starlette.applications import Starlette

from lemma.core.errors import UserError
from lemma.core.events import silent
from lemma.engines.protocol import EngineError, Request, Sampling
from lemma.engines.remote.native_servers import layout_of
from lemma.engines.remote.rollout_wire import completion_as_json, completion_of, request_as_json, request_of
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions
from lemma.serving import rollout_host
from lemma.serving.http_server import HttpServer
from lemma.serving.rollout_host import RolloutHost, Sample, Work
from lemma.serving.wire_errors import ApiError
from tests.cluster.test_rl_ranks import MODEL


def asked(name: str, tokens: int = 8) -> Request:
    return Request((name,), np.array([5, 6, 7]), Sampling(max_tokens=tokens, ignore_eos=True))


@pytest.fixture(scope="module")
def order() -> dict[str, Any]:
    model = ModelOptions.model_validate(MODEL)
    return {
        "id": "mine",
        "model": model.model_dump(mode="json"),
        "start_from": None,
        "device": "cpu",
        "model_seed": 0,
        "seed": 0,
        "engine": {"name": "native"},
        "cache": None,
        "layout": layout_of(build_policy(model, torch.device("cpu"), 0)),
        "threads": torch.get_num_threads(),
        "is_deterministic": False,
    }


class Served:
    """A host whose turns the test takes. `events` are those of each work, under the name that the test gave it."""

    def __init__(self, order: dict[str, Any]):
        self.host = RolloutHost(silent)
        self.host.load(order)
        self.host._version = 3
        self.events: dict[str, list[Any]] = {}

    def ask(
        self,
        name: str,
        *batches: list[Request],
        session: str | None = None,
        start: int = 0,
        whole: bool = False,
        **of: Any,
    ) -> Work:
        self.events[name] = events = []
        work = Work(session, start, whole, list(batches), of.get("model", "mine"), of.get("version", 3), events.append)
        self.host.submit(work)
        return work

    def run(self) -> None:
        """Until nothing is left to do now."""
        host, idle = self.host, 0

        def is_over() -> bool:
            nonlocal idle
            idle = 0 if host._running or host._orders else idle + 1
            return idle > 3

        host.run(is_over)

    def drawn(self, name: str) -> list[str]:
        """The names of the requests whose samples have come, and None at the end."""
        return [event.completion.key[0] if isinstance(event, Sample) else event for event in self.events[name]]


@pytest.fixture
def served(order: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(rollout_host, "IDLE_SECONDS", 0.0)
    return Served(order)


def test_a_session_has_the_engine_until_it_ends(served: Served) -> None:
    served.ask("one", [asked("a")], session="1")
    served.ask("other", [asked("b")], session="2", whole=True)
    served.ask("free", [asked("c")])
    served.run()
    assert served.drawn("one") == ["a", None] and served.drawn("other") == served.drawn("free") == []
    served.ask("more", [asked("d")], session="1", start=1)
    served.run()
    assert served.drawn("more") == ["d", None] and served.drawn("other") == []
    served.host.end("1")
    served.run()
    assert served.drawn("other") == ["b", None] and served.drawn("free") == ["c", None], "a whole one ends by itself"


def test_a_session_that_asks_for_nothing_does_not_keep_others_for_ever(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.ask("one", [asked("a")], session="1")
    served.run()
    monkeypatch.setattr(rollout_host, "HOLD_SECONDS", -1.0)
    served.ask("other", [asked("b")], session="2", whole=True)
    served.run()
    assert served.drawn("other") == ["b", None]
    served.ask("late", [asked("c")], session="1", start=1)
    served.run()
    assert served.drawn("late") == [{"is_unknown": True}, None], "its client begins it again"
    served.ask("again", [asked("a")], [asked("c")], session="1")
    served.run()
    assert served.drawn("again") == ["a", "c", None]


def test_requests_without_a_session_are_generated_together(served: Served) -> None:
    works = {served.ask("one", [asked("a", 12)]), served.ask("other", [asked("b", 12)])}
    served.host._obey()
    served.host._admit()
    assert served.host._running == works
    served.run()
    assert served.drawn("one") == ["a", None] and served.drawn("other") == ["b", None]


def test_a_request_that_cannot_be_served_leaves_nothing_behind(served: Served) -> None:
    """The first request was in the engine already when the second one was refused."""
    served.ask("one", [asked("good"), Request(("long",), np.arange(5, 90), Sampling(max_tokens=8))], session="1")
    served.run()
    (error, end) = served.drawn("one")
    assert isinstance(error, ApiError) and "request long cannot be generated" in str(error) and end is None
    served.host.end("1")
    served.ask("other", [asked("other")], session="2", whole=True)
    served.run()
    assert served.drawn("other") == ["other", None]


def test_who_goes_away_is_not_generated_for(served: Served) -> None:
    work = served.ask("one", [asked("a", 16)], session="1")
    served.host._obey()
    served.host._admit()
    served.host.drop(work)
    served.ask("other", [asked("b")], session="2", whole=True)
    served.run()
    assert served.drawn("one") == [] and served.drawn("other") == ["b", None]


def test_who_means_other_weights_is_told(served: Served, order: dict[str, Any]) -> None:
    served.ask("newer", [asked("a")], version=4)
    served.ask("other", [asked("a")], model="another trainer's")
    served.run()
    assert served.drawn("newer") == served.drawn("other") == [{"is_stale": True}, None]
    assert served.host.probe({"id": "mine", "version": 2, "prompt": [1, 2]}) == {"is_stale": True}
    with pytest.raises(UserError, match="built a model with other weights than the trainer's"):
        served.host.load(order | {"layout": []})


def test_what_is_sent_is_read_to_the_last_bit(served: Served) -> None:
    request = Request(("a", 1), np.array([5, 6, 7]), Sampling(max_tokens=9, top_p=0.9, stop=("x",), stop_ids=(3,)), 2)
    same = request_of(request_as_json(request))
    assert (same.key, same.prompt.tolist(), same.sampling, same.n) == (("a", 1), [5, 6, 7], request.sampling, 2)
    served.ask("one", [request])
    served.run()
    for event in served.events["one"][:2]:
        one, other = event.completion, completion_of(completion_as_json(event.completion))
        assert one.kept.any() and one.policy_version == other.policy_version and one.order == other.order
        for name in ("ids", "logprobs", "kept"):
            mine, its = getattr(one, name), getattr(other, name)
            assert mine.tobytes() == its.tobytes() and mine.dtype == its.dtype


@pytest.mark.parametrize("content", [{}, [], {"key": [1]}, {"key": ["a"], "prompt": "x", "sampling": {"max_tokens": 1}},
                                     {"key": ["a"], "prompt": [1], "sampling": {"rm": 1}}])  # fmt: skip
def test_what_is_no_request_is_refused(content: Any) -> None:
    with pytest.raises(EngineError, match="this is not a request for samples"):
        request_of(content)


def test_small_pieces_of_an_answer_are_sent_at_once() -> None:
    """Connections inherit it from the listener; asyncio sets it for none that names no protocol."""
    server = HttpServer(Starlette()).start()
    try:
        assert server._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        server.close()
