"""Generation servers in processes that are forked from one that has everything imported."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.forked import wait_for
from tests.preloaded import CONTEXT

KEY = "known to both"


class ForkedServer:
    """A native generation server at a port of its own; `fault` is LEMMA_FAULT there. If it `holds`, responses of steps
    after the next one wait for the next weights once nothing else is left."""

    def __init__(self, folder: Path, port: int | None = None, fault: str = "", *, holds: bool = False):
        self.port = port or free_port()
        self._process = CONTEXT.Process(target=_serve, args=(self.port, str(folder), fault, holds), daemon=True)
        self._process.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def forked_servers(folder: Path, count: int, *faults: str, holds: bool = False) -> Iterator[list[ForkedServer]]:
    """So many servers, each with its fault, if there is one for it."""
    servers = [ForkedServer(folder, fault="".join(faults[n : n + 1]), holds=holds) for n in range(count)]
    try:
        for server in servers:
            wait_for(server.is_listening)
        yield servers
    finally:
        for server in servers:
            server.kill()


def _serve(port: int, folder: str, fault: str, holds: bool) -> None:
    import tempfile

    import torch

    from lemma.engines.remote.server_guard import KEY_VARIABLE
    from lemma.serving.rollout_server import serve_rollouts

    os.environ |= {KEY_VARIABLE: KEY, "LEMMA_FAULT": fault}
    tempfile.tempdir = folder
    torch.set_num_threads(1)
    if holds:
        _hold_what_flies()
    serve_rollouts(None, "127.0.0.1", port)


def _hold_what_flies() -> None:
    """Each response gets its first tokens before it is held."""
    from lemma.engines.protocol import Key
    from lemma.serving.rollout_host import RolloutHost, Work

    admit, begun = RolloutHost._admit, set[tuple[str, object]]()

    def waiting(host: RolloutHost) -> dict[Key, Work]:
        """The requests that the engine has not answered, and whose they are."""
        driver = host._driver
        new = set() if driver is None else set(driver._inbox)
        calls = {work.call: work for work in host._running if work.call is not None}
        active = {} if driver is None else driver._active
        given = {key: calls[call] for key, call in active.items() if call in calls}
        return given | {request.key: calls[call] for call in new & set(calls) for request in call.requests}

    def held(host: RolloutHost) -> None:
        admit(host)
        while (owners := waiting(host)) and host._holder is None:
            keys, steps = {(host._id, key) for key in owners}, {int(key[1]) for key in owners}
            is_over = any(work.is_over for work in owners.values())
            if is_over or not keys <= begun or min(steps) <= host._version + 1:
                begun.update(keys)
                return
            host._wake.wait(0.01)
            host._wake.clear()
            host._obey()
            admit(host)

    RolloutHost._admit = held  # type: ignore[method-assign]
