"""A server that speaks OpenEnv's wire badly: nothing that it sends becomes a reward, and no worker is lost by it."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from lemma.core.types import Problem
from lemma.environments import Observation, OpenEnv
from lemma.environments.env_handle import EnvFailure
from tests.environments.trouble import Worlds, wait

ACCEPT = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TOLD = json.dumps({"type": "observation", "data": {"observation": {"said": "go"}, "done": False, "reward": 1.0}})
# What is sent in answer to an action of this name; nothing at all to others.
ANSWERS: dict[str, bytes] = {
    "text": b"hello",
    "list": b"[1, 2]",
    "null": b"null",
    "error": b'{"type": "error", "data": "boom"}',
    "empty": b'{"type": "observation", "data": null}',
    "deep": b"[" * 100_000,
    "binary": b"\xff\xfe",
    "no number": b'{"type": "observation", "data": {"observation": {}, "reward": "much"}}',
    "fine": TOLD.encode(),
}


def framed(data: bytes) -> bytes:
    size = len(data)
    length = bytes([size]) if size < 126 else bytes([127]) + size.to_bytes(8, "big")
    return b"\x81" + length + data


def read(file: socket.SocketIO) -> bytes:
    """One message of a client, which are short here."""
    _, size = file.read(2) or b"\0\0"
    size &= 127
    if size == 126:
        size = int.from_bytes(file.read(2) or b"", "big")
    mask, data = file.read(4) or b"", b""
    while len(data) < size:
        data += file.read(size - len(data)) or b""
    return bytes(one ^ mask[place % 4] for place, one in enumerate(data))


def serve(connection: socket.socket) -> None:
    with connection, socket.SocketIO(connection, "r") as file:
        head = b""
        while b"\r\n\r\n" not in head:
            head += file.read(4096) or b""
        key = next(line for line in head.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key")).split()[1]
        accept = base64.b64encode(hashlib.sha1(key + ACCEPT.encode()).digest())
        lines = (
            b"HTTP/1.1 101 Go on",
            b"Upgrade: websocket",
            b"Connection: Upgrade",
            b"Sec-WebSocket-Accept: " + accept,
        )
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
        while True:
            try:
                asked = json.loads(read(file))
            except (OSError, ValueError):
                return
            said = "fine" if asked["type"] == "reset" else asked["data"]["message"]
            if said in ANSWERS:
                connection.sendall(framed(ANSWERS[said]))


@pytest.fixture
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def test_a_server_that_answers_with_garbage_or_never(url: str) -> None:
    worlds = Worlds(OpenEnv(url=url, workers=1, step_seconds=2.0))
    try:
        said = [*ANSWERS, "nothing"]
        held = [worlds.opened(Problem((), id=word), 0) for word in said]
        wait(worlds, *held)
        for one, word in zip(held, said, strict=True):
            worlds.say(one, word)
        answers = dict(zip(said, wait(worlds, *held), strict=True))
        assert answers.pop("fine") == Observation("go")
        assert all(isinstance(answer, EnvFailure) for answer in answers.values()), answers
        unknown = {word for word, answer in answers.items() if not answer.is_limit}
        assert unknown == {"no number"}, "the others broke their world twice"
        assert worlds.lost == 0
    finally:
        worlds.close()
