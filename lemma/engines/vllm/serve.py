"""vLLM's server as a child of Lemma: it answers those who know the key, and ends when its parent does.

python -m lemma.engines.vllm.serve <options of vllm.entrypoints.openai.api_server>
"""

from __future__ import annotations

import os
import runpy
import secrets
import signal
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "LEMMA_VLLM_KEY"
PARENT_VARIABLE = "LEMMA_VLLM_PARENT"
HEADER = "x-lemma-key"
POLICY_VIOLATION = 1008  # of RFC 6455

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware: every request and every websocket must carry the key, those of the development endpoints too."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        self._key = os.environ[KEY_VARIABLE].encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._knows_the_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        elif scope["type"] == "websocket":
            await receive()  # the wish to connect, which must be taken before it is refused
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    def _knows_the_key(self, scope: MutableMapping[str, Any]) -> bool:
        given = dict(scope.get("headers", ())).get(HEADER.encode(), b"")
        return secrets.compare_digest(given, self._key)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    parent = int(os.environ[PARENT_VARIABLE])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
