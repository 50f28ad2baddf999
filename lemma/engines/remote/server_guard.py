"""What stands before every generation server: it answers only clients that have the key, and takes files from them. A
server ends with the process that started it, if one did."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from pathlib import Path

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lemma.core.errors import UserError
from lemma.engines.remote.process_group import kill_group

KEY_VARIABLE = "LEMMA_SERVERS_KEY"
OLD_KEY_VARIABLE = "LEMMA_VLLM_KEY"
PARENT_VARIABLE = "LEMMA_SERVER_PARENT"
HEADER = "x-lemma-key"
FILES_PATH = "/lemma/files/"  # folder and name of a file that is sent
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
POLICY_VIOLATION = 1008  # of RFC 6455


def given_key() -> str | None:
    """The key of the servers in the environment, if there is one."""
    return os.environ.get(KEY_VARIABLE) or os.environ.get(OLD_KEY_VARIABLE) or None


def check_key() -> None:
    """Refuse to start a server for other machines without a key."""
    if given_key() is None:
        raise UserError(
            f"the server needs a key that the trainer knows too: {KEY_VARIABLE} is not set",
            fix=f"set it on both sides, for example to what `openssl rand -hex 16` prints: export {KEY_VARIABLE}=...",
        )


class Guard:
    """ASGI middleware: every request and websocket must carry the key, including those to development endpoints."""

    def __init__(self, app: ASGIApp):
        key = given_key()
        assert key, "a server is started with a key"
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._knows_the_key(scope):
            is_file = scope["type"] == "http" and str(scope.get("path", "")).startswith(FILES_PATH)
            app = await _keep_file(Request(scope, receive)) if is_file else self._app
            await app(scope, receive, send)
        elif scope["type"] == "http":
            await Response(status_code=401)(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the connect event, which must be received before it can be refused
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    def _knows_the_key(self, scope: Scope) -> bool:
        given = dict(scope.get("headers", ())).get(HEADER.encode(), b"")
        return secrets.compare_digest(given, self._key)


def files_folder() -> Path:
    """Where files that are sent to this process lie."""
    return Path(tempfile.gettempdir()) / f"lemma-files-{os.getpid()}"


async def _keep_file(request: Request) -> Response:
    """Write the body of a request to a file atomically, or remove a folder; answer with its path."""
    name, method = str(request.scope["path"]).removeprefix(FILES_PATH), request.method
    if method not in ("PUT", "DELETE") or not FILE_NAME.fullmatch(name):
        return JSONResponse({"error": "a file is sent by PUT, as folder/name"}, 400)
    path = files_folder() / name
    if method == "DELETE":
        shutil.rmtree(path.parent, ignore_errors=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        with part.open("wb") as stream:
            try:
                async for piece in request.stream():
                    stream.write(piece)
            except ClientDisconnect:
                return Response(status_code=400)
        os.replace(part, path)
    return JSONResponse({"folder": str(path.parent)})


def end_with_parent() -> None:
    """From now on, this process and all that it started end with the process that started it, if one did."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    kill_group(os.getpgrp())
