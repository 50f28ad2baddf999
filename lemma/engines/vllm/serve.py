"""vLLM's server behind Lemma's guard: it serves clients that have the key, accepts files from them, and exits with its
parent process, if it has one.

python -m lemma.engines.vllm.serve <options of vllm.entrypoints.openai.api_server>
"""

from __future__ import annotations

import json
import os
import re
import runpy
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from lemma.engines.vllm.process_group import kill_group

KEY_VARIABLE = "LEMMA_VLLM_KEY"
PARENT_VARIABLE = "LEMMA_VLLM_PARENT"
HEADER = "x-lemma-key"
FILES_PATH = "/lemma/files/"  # folder and name of a file that is sent
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
POLICY_VIOLATION = 1008  # of RFC 6455

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware: every request and websocket must carry the key, including those to development endpoints."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        self._key = os.environ[KEY_VARIABLE].encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._knows_the_key(scope):
            is_file = scope["type"] == "http" and str(scope.get("path", "")).startswith(FILES_PATH)
            await (_keep_file(scope, receive, send) if is_file else self._app(scope, receive, send))
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        elif scope["type"] == "websocket":
            await receive()  # the connect event, which must be received before it can be refused
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    def _knows_the_key(self, scope: MutableMapping[str, Any]) -> bool:
        given = dict(scope.get("headers", ())).get(HEADER.encode(), b"")
        return secrets.compare_digest(given, self._key)


async def _keep_file(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Write the body of a request to a file atomically, or remove a folder; answer with its path."""
    name, method = str(scope["path"]).removeprefix(FILES_PATH), scope.get("method")
    if method not in ("PUT", "DELETE") or not FILE_NAME.fullmatch(name):
        return await _answer(send, 400, {"error": "a file is sent by PUT, as folder/name"})
    path = Path(tempfile.gettempdir()) / f"lemma-files-{os.getpid()}" / name
    if method == "DELETE":
        shutil.rmtree(path.parent, ignore_errors=True)
        return await _answer(send, 200, {"folder": str(path.parent)})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as stream:
        is_more = True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            stream.write(message.get("body", b""))
            is_more = message.get("more_body", False)
    os.replace(part, path)
    return await _answer(send, 200, {"folder": str(path.parent)})


async def _answer(send: Send, status: int, values: dict[str, str]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(values).encode()})


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    kill_group(os.getpgrp())


def main() -> None:
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
