"""The HTTP server: an event loop in a thread of its own (uvicorn), for `lemma serve`, the gateway of agents and
`lemma watch`."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import threading
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lemma.core.errors import UserError, warn
from lemma.serving.wire_errors import ApiError

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
# Seconds after which a connection is closed whose client is silent where it should speak, and for answers to finish
# when the server closes.
SILENT_SECONDS = 600
LAST_SECONDS = 2
LONGEST_HEAD = 2**16
# How much of a client is read before others are answered: six bytes may be a chunk of one, which takes microseconds.
READ_AT_ONCE = 2**13


class JsonReply(Response):
    """JSON; lone surrogates become question marks."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content)


def as_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def as_reply(error: ApiError) -> JsonReply:
    return JsonReply(error.as_dict(), error.status)


class HttpServer:
    """A server of an ASGI application, from `start` to `close`."""

    def __init__(self, app: ASGIApp, address: str = LOOPBACK[0], port: int = 0):
        self._address, self._socket = address, _listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            _Doorway(app, LOOPBACK if address in LOOPBACK else None),
            http=_Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level=100,  # the terminal belongs to whoever started the server
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=1024,
            h11_max_incomplete_event_size=LONGEST_HEAD,
            timeout_keep_alive=SILENT_SECONDS,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="lemma-http", daemon=True)

    @property
    def address(self) -> str:
        name = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{name}:{self.port}"

    @property
    def url(self) -> str:
        """The `base_url` for clients."""
        return f"{self.address}/v1"

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> HttpServer:
        self._thread.start()
        return self

    def end(self, seconds: int) -> None:
        """Accept no more connections, and close each when its answer is sent; what is left after these seconds is cut
        off. Does not wait."""
        self._server.config.timeout_graceful_shutdown = seconds
        self._server.should_exit = True

    def close(self) -> None:
        """`end`, and wait until nothing is left."""
        self.end(LAST_SECONDS)
        self._thread.join()


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address.strip("[]"), port), family=family, backlog=1024)
        # For connections too: asyncio sets it only where a socket names its protocol, and pieces would wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UserError(
            f"{address} port {port} cannot be used ({error.strerror})",
            fix="write --port and another number, or leave it out",
        ) from error


class _Server(uvicorn.Server):
    """At the limit of open files, new clients wait until others are gone, and one sentence says so."""

    _is_full = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._hear)
        await super().startup(sockets)

    def _hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop says this a thousand times a second, since it tries once for each client that may wait."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            # The loop goes back to its socket a second after each try, also where that is closed by then.
            if not (self._is_full and self.should_exit):
                loop.default_exception_handler(context)
        elif not self._is_full:
            self._is_full = True
            warn("no more files can be open (ulimit -n), and clients who come now wait until others are gone")


class _Doorway:
    """What every application is kept from: a request that says in two ways how long it is, and one to another name. A
    loopback server has its own names only: a page of another site, open in a browser on this machine, may send
    requests, but under its own name (DNS rebinding)."""

    def __init__(self, app: ASGIApp, names: Collection[str] | None):
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(dict(scope["headers"]))
        if error is None:
            await self._app(scope, receive, send)
        else:
            await JsonReply(error.as_dict(), error.status, {"Connection": "close"})(scope, receive, send)

    def _error(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        if b"content-length" in headers and b"transfer-encoding" in headers:
            return ApiError(400, "the request says in two ways how long it is; send one length, or chunks")
        try:
            name = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname or ""
        except ValueError as error:
            return ApiError(400, f"this is no address: {error}")
        if self._names is None or name in self._names:
            return None
        return ApiError(403, f"this server does not answer for '{name}'")


class _Protocol(H11Protocol):
    """One request at a time: what a client sends before it is answered is not read as a request, and does not keep the
    connection from noticing that the client is gone. A client that is silent where it should speak is not waited for
    forever."""

    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_AT_ONCE  # type: ignore[attr-defined]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._silence is not None:
            self._silence.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._wait()
        if self._is_answering():
            self.cycle.keep_alive = False
            return
        super().data_received(data)
        if self._is_answering() and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state.__name__ not in ("IDLE", "SEND_RESPONSE"):  # it was answered before its body ended
            self.transport.close()
            return
        error = ApiError(400, "this is not a request of HTTP/1.1 that can be read")
        super().send_400_response(as_json(error.as_dict()).decode())

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _wait(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self.loop.call_later(SILENT_SECONDS, self._close_silent)

    def _close_silent(self) -> None:
        if not self._is_answering():
            self.transport.abort()
