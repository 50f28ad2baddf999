"""`lemma serve` as a process: 200 clients of whom half leave, and the limit of open files."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.preloaded import Python

CLIENTS, SEEDS, MOST_WORKERS = 200, 8, 40


SERVE = "import sys\nfrom lemma.cli import main\nsys.exit(main())\n"
FEW_FILES = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"


@contextmanager
def served(folder: Path, before: str = "") -> Iterator[tuple[psutil.Process, int]]:
    """The process and its port; what it says on stderr is in a file `said` in the folder."""
    words = ["-c", before + SERVE, "serve", "tiny", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        open(folder / "said", "w") as said,
        Python(words, env=environment, stdout=subprocess.PIPE, stderr=said) as process,
    ):
        try:
            assert process.stdout is not None
            yield psutil.Process(process.pid), urlsplit(process.stdout.readline().strip()).port or 0
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def question(seed: int, stream: bool = False) -> bytes:
    asked = {"prompt": "how many stones " * (1 + 12 * seed), "max_tokens": 24, "seed": seed, "stream": stream}
    body = json.dumps(asked)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def whole(port: int, seed: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(question(seed))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 " in head.splitlines()[0], body
    return str(json.loads(body)["choices"][0]["text"])


async def cut(port: int, seed: int, chance: random.Random) -> None:
    """Ask, and leave: in the middle of the question, after it, or when the answer begins; politely or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data, way = question(seed, stream=True), chance.randrange(3)
    writer.write(data[: -20 if way == 0 else len(data)])
    with suppress(ConnectionError):
        await writer.drain()
        if way == 2:
            await reader.read(100)
    if chance.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()
    await asyncio.sleep(chance.uniform(0.02, 0.2))


async def load(port: int, seconds: float, right: list[str]) -> Counter[str]:
    """What 200 clients did; those who wait for their answers get the right ones."""
    until, seen = time.monotonic() + seconds, Counter[str]()

    async def one(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < until:
            seed = chance.randrange(SEEDS)
            if number % 2:
                await cut(port, seed, chance)
            else:
                assert await whole(port, seed) == right[seed]
            seen["cut" if number % 2 else "whole"] += 1

    await asyncio.gather(*map(one, range(CLIENTS)))
    return seen


def reading_many_lists(process: psutil.Process, port: int) -> float:
    """Seconds of the server for a body of a MiB that is refused when it has been read."""
    body = b'{"prompt": [' + b"[]," * 300_000 + b"[]]}"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    before = sum(process.cpu_times()[:2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b" 400 " in connection.recv(100)
    return float(sum(process.cpu_times()[:2]) - before)


def at_rest(process: psutil.Process, handles: int) -> int:
    """Its memory, as soon as nothing is left of any client."""
    until = time.monotonic() + 60
    while process.num_fds() > handles:
        assert time.monotonic() < until, process.net_connections()
        time.sleep(0.05)
    return int(process.memory_info().rss)


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.long)])
def test_200_clients_of_whom_half_leave(seconds: int, tmp_path: Path) -> None:
    with served(tmp_path) as (process, port):

        async def alone() -> list[str]:
            return [await whole(port, seed) for seed in range(SEEDS)]

        right = asyncio.run(alone())
        assert sum(reading_many_lists(process, port) for _ in range(4)) < 1
        handles = process.num_fds()
        threads = process.num_threads()
        asyncio.run(load(port, 0.3 * seconds, right))
        warm = at_rest(process, handles)
        seen = asyncio.run(load(port, 0.7 * seconds, right))
        print(seen, warm, process.memory_info().rss, process.num_threads(), threads)
        assert at_rest(process, handles) < warm + 2**25
        assert process.num_threads() <= threads + MOST_WORKERS
        assert min(seen["cut"], seen["whole"]) >= CLIENTS // 2
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_at_the_limit_of_open_files_clients_wait_in_silence(tmp_path: Path) -> None:
    with served(tmp_path, FEW_FILES) as (process, port):
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        until = time.monotonic() + 60
        while not (tmp_path / "said").read_text():
            assert time.monotonic() < until
            time.sleep(0.02)
        begun, before = time.monotonic(), sum(process.cpu_times()[:2])
        time.sleep(2)
        used = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun)
        assert used < 0.5, "the server spins"
        for connection in crowd:
            connection.close()
        assert asyncio.run(whole(port, 0)), "who waited is answered"
        slow = socket.create_connection(("127.0.0.1", port))
        slow.sendall(question(0)[:-1])  # whose end is waited for when the server ends at its limit
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        while process.num_fds() < 64:
            time.sleep(0.02)
        process.terminate()
        time.sleep(1.5)
        slow.close()
    said = (tmp_path / "said").read_text()
    assert said.count("no more files can be open") == 1 and len(said.splitlines()) < 5, said[:2000]
