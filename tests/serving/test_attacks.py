"""What one client can do to everybody: bodies, lengths, nesting, prompts, and connections that end in odd ways."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lemma.reports.live_page import Watch
from lemma.reports.run_reader import open_runs
from lemma.serving.http_server import _Protocol
from lemma.serving.plain_host import PlainHost
from tests.reports.made_runs import small_run
from tests.serving.parrot import write_parrot
from tests.serving.test_doors import Place

ASKED = {"prompt": "how many pens ? Assistant:", "max_tokens": 4}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NESTED = b"[" * 200_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    # What it says never ends: after pens come pens.
    place = Place(write_parrot(tmp_path_factory.mktemp("parrot"), ("Assistant:", "pens", "pens")))
    yield place
    place.close()


@pytest.fixture(scope="module")
def port(place: Place) -> int:
    return urlsplit(place.open(PlainHost(place.driver, place.dialogue, ["parrot"]))).port or 0


def post(port: int, body: Any, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def send(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(data)
    return connection


def whole(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    said = b""
    with connection:
        while part := connection.recv(2**16):
            said += part
    return said


def test_a_body_in_chunks_is_read(port: int) -> None:
    body = json.dumps(ASKED).encode()
    status, answer = post(port, iter([body[:10], body[10:]]))
    assert status == 200 and answer["choices"][0]["text"] == "pens pens pens pens"


def test_a_body_in_chunks_of_one_byte_leaves_others_their_turns(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk takes microseconds; between two looks at a client, others are looked at."""
    read: list[int] = []
    receive = _Protocol.data_received

    def counted(protocol: _Protocol, data: bytes) -> None:
        read.append(len(data))
        receive(protocol, data)

    monkeypatch.setattr(_Protocol, "data_received", counted)
    body = json.dumps(ASKED).encode()
    chunks = b"1\r\n \r\n" * 50_000 + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    said = send(port, (HEAD + "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n").encode() + chunks)
    assert b"pens pens pens pens" in whole(said) and sum(read) > 300_000 and max(read) <= 8192


def test_two_lengths_are_refused(port: int, tmp_path: Path) -> None:
    lengths = "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    watch = Watch(open_runs([small_run(tmp_path / "run", steps=1)]), ["words"]).start()
    address = urlsplit(watch.address)
    for place, head in ((port, HEAD), (address.port or 0, HEAD.replace("/v1/completions", f"{address.path}data"))):
        said = whole(send(place, (head + lengths).encode()))
        assert b" 400 " in said and b"in two ways how long it is" in said
    watch.close()


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "5, 6", "x"])
def test_lengths_that_are_none(length: str, port: int, tmp_path: Path) -> None:
    assert b" 400 " in whole(send(port, f"{HEAD}Content-Length: {length}\r\n\r\n".encode()))
    watch = Watch(open_runs([small_run(tmp_path / "run", steps=1)]), ["words"]).start()
    address = urlsplit(watch.address)
    head = f"POST {address.path}data HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    assert b" 400 " in whole(send(address.port or 0, head.encode()))
    status, said = ask_watch(address.port or 0, address.path + "data", NESTED)
    assert status == 400 and said == b"the question is not JSON"
    watch.close()


def ask_watch(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_nested_json_is_refused_in_words(port: int) -> None:
    status, answer = post(port, NESTED)
    assert status == 400 and answer["error"]["message"] == "the body is not JSON"
    for depth in (990, 3000):  # in a text, where it is read later
        function = {"name": "add", "arguments": '{"a":' * depth + "1" + "}" * depth}
        asked = {"role": "assistant", "tool_calls": [{"function": function}]}
        user = {"role": "user", "content": "?"}
        body = json.dumps({"messages": [user, asked, user]})
        status, answer = post(port, body, "/v1/chat/completions")
        assert status == 400 and "nested too deeply" in answer["error"]["message"]


@pytest.mark.parametrize("size", [2**24, 63 * 2**20])
def test_a_body_that_no_model_reads_is_not_read_either(size: int, port: int) -> None:
    begun = time.process_time()
    status, answer = post(port, b'{"prompt": "' + b"[],[]" * (size // 5) + b'"}')
    assert status == 413 and "more than 1048576 bytes" in answer["error"]["message"]
    assert time.process_time() - begun < 5, "the client's part is in it too"


def test_prompts_that_cannot_fit_are_not_tokenised(place: Place, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any) -> Any:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(place.dialogue, "begin", never)
    monkeypatch.setattr(place.dialogue, "prompt", never)
    long = "pens " * 20_000
    for path, asked in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", {"prompt": [5] * 20_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}] * 4_000}),
    ):
        status, answer = post(port, json.dumps(asked), path)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", path


def test_prompts_times_n_have_a_bound(port: int) -> None:
    for asked in ({"prompt": ["pens"] * 65, "n": 2}, {"prompt": ["pens"] * 200_000}, {"prompt": [[5]] * 129}):
        status, answer = post(port, json.dumps(asked))
        assert status in (400, 413) and "more than" in answer["error"]["message"]
    assert post(port, json.dumps({**ASKED, "prompt": ["pens"] * 64, "n": 2}))[0] == 200


def test_stop_texts_have_a_bound(port: int) -> None:
    """What has been said is compared with each at every token: with long ones, an answer took minutes of everybody's
    time."""
    for stop in ("x" * 257, ["pens", "x" * 900_000]):
        status, answer = post(port, json.dumps({**ASKED, "stop": stop}))
        assert status == 400 and answer["error"]["message"] == "stop has a text of more than 256 characters"
    assert post(port, json.dumps({**ASKED, "stop": ["x" * 256] * 16}))[0] == 200


@pytest.mark.parametrize("more", [b"", b"X", (HEAD + "\r\n").encode()])
def test_a_client_that_is_gone_is_noticed_whatever_it_sent_last(
    more: bytes, place: Place, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({**ASKED, "max_tokens": 200, "n": 128}).encode()
    engine, taken, cancelled = place.driver.engine, list[Any](), list[Any]()
    submit, cancel = engine.submit, engine.cancel
    monkeypatch.setattr(engine, "submit", lambda request: (submit(request), taken.append(request))[0])
    monkeypatch.setattr(engine, "cancel", lambda key: (cancel(key), cancelled.append(key))[0])
    connection = send(port, HEAD.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body + more)
    until = time.monotonic() + 60
    while not taken and time.monotonic() < until:
        time.sleep(0.001)
    connection.close()
    while not cancelled and time.monotonic() < until:
        time.sleep(0.001)
    assert len(cancelled) == 1 and not place.driver.active


def test_a_request_behind_an_unanswered_one_is_not_answered(port: int) -> None:
    body = json.dumps(ASKED).encode()
    one = HEAD.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert whole(send(port, one + one)).count(b"200 OK") == 1
