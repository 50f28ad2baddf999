"""OpenAI's HTTP interface as an ASGI application: routes, keys, bodies, streams, and clients that are gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lemma.core.errors import UserError
from lemma.serving.exchange import Exchange, Host, WireCaller
from lemma.serving.http_server import JsonReply, as_json, as_reply
from lemma.serving.plain_host import limit_of
from lemma.serving.wire_errors import ApiError
from lemma.serving.wire_replies import ReplyWriter
from lemma.serving.wire_requests import Kind, read_call

# What a body may have for each token that a model takes: six bytes for each character that is escaped. At least a MiB.
BYTES_PER_TOKEN, LEAST_BODY = 64, 2**20
# How much is read of a request that was refused before, and for how long.
LONGEST_REST, REST_SECONDS = 2**28, 5.0
# How often to look whether the session of a call is over.
LOOK_SECONDS = 0.25
CALLS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "text"}
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def openai_app(host: Host, origins: Sequence[str] = ()) -> Starlette:
    """`origins` are the sites whose pages may ask in a browser."""
    created = int(time.time())
    model = {"id": host.name, "object": "model", "created": created, "owned_by": "lemma"}

    async def health(request: Request) -> Response:
        return JsonReply({"status": "ok", "requests": host.driver.active})

    async def models(request: Request) -> Response:
        _caller(host, request)
        return JsonReply({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        _caller(host, request)
        _check_model(host, request.path_params["name"])
        return JsonReply(model)

    def call(kind: Kind) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            caller = _caller(host, request)
            body = await read_body(request, max(LEAST_BODY, BYTES_PER_TOKEN * limit_of(host.driver)))
            loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()

            def put(event: Any) -> None:
                with contextlib.suppress(RuntimeError):  # the server has been closed
                    loop.call_soon_threadsafe(events.put_nowait, event)

            exchange = await to_thread.run_sync(_begin, host, caller, kind, body, put)
            return _Answer(
                exchange, events, caller, ReplyWriter(exchange, host.dialogue, exchange.asked.model or host.name)
            )

        return answer

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            *(Route(path, call(kind), methods=["POST"]) for path, kind in CALLS.items()),
        ],
        middleware=[
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        ] if origins else [],
        exception_handlers={ApiError: _refused, HTTPException: _not_here, Exception: _broken},
    )  # fmt: skip


def _caller(host: Host, request: Request) -> WireCaller:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return host.caller(key.strip() if scheme.lower() == "bearer" else "", request.headers.get("X-Session-ID"))


def _check_model(host: Host, name: str | None) -> None:
    if name is not None and not host.serves(name):
        raise ApiError(404, f"there is no model '{name}'; there is: {host.name}", param="model", code="model_not_found")


async def read_body(request: Request, longest: int) -> bytes:
    size = request.headers.get("Content-Length", "0")
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the request has another type; send the header Content-Type: application/json")
    too_long = ApiError(413, f"the request has more than {longest} bytes, and the model could not read all that")
    if int(size) > longest:
        raise too_long
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > longest:
            raise too_long
    request.state.is_read = True
    return bytes(body)


def _begin(host: Host, caller: WireCaller, kind: Kind, body: bytes, put: Callable[[Any], None]) -> Exchange:
    """Runs in a thread, because tokenising takes its time."""
    content = parsed(body)
    try:
        asked = read_call(kind, content)
        _check_model(host, asked.model)
        return Exchange(host, caller, asked, put)
    except UserError as error:
        raise ApiError.of(error) from error
    except (
        RecursionError
    ) as error:  # what is nested may be JSON inside of a text, or too deep for the chat template only
        raise ApiError(400, "something in the body is nested too deeply") from error


def parsed(body: bytes) -> Any:
    """The parsed body; lone surrogates become question marks, since no tokenizer accepts them."""
    try:
        content = json.loads(body)
        if HALF_PAIR.search(body):
            content = json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
        return content
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the body is not JSON") from error


class _Answer(Response):
    """Sent while it is generated, or as a whole. When it ends, however it ends, nothing of the call is left."""

    def __init__(self, exchange: Exchange, events: asyncio.Queue[Any], caller: WireCaller, writer: ReplyWriter):
        self.background = None
        self._exchange, self._events, self._caller, self._writer = exchange, events, caller, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self._exchange.asked.stream:
                await self._stream(send)
                return
            async for _ in self._exchange.follow(self._events):
                pass
            await JsonReply(self._writer.whole())(scope, receive, send)
        except ConnectionError:
            pass
        finally:
            watcher.cancel()
            self._exchange.close()

    async def _watch(self, receive: Receive) -> None:
        """Tell the exchange that nobody waits: the client is gone, or its session is over."""
        gone = asyncio.ensure_future(_gone(receive))
        try:
            while not (await asyncio.wait({gone}, timeout=LOOK_SECONDS))[0]:
                if self._caller.is_over:
                    self._events.put_nowait(ApiError(401, "this session is over", code="session_over"))
                    return
            self._events.put_nowait(ConnectionError("the client has gone away"))
        finally:
            gone.cancel()

    async def _stream(self, send: Send) -> None:
        """Events as they arrive. An error before the first event has its own HTTP status, a later one is an event."""
        news = self._exchange.follow(self._events)
        first = await anext(news)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def say(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            for piece in self._writer.pieces(first):
                await say(_event(piece))
            async for one in news:
                await say(b"".join(map(_event, self._writer.pieces(one))))
            if self._exchange.asked.stream_usage:
                await say(_event(self._writer.usage_piece()))
            await say(b"data: [DONE]\n\n")
        except ApiError as error:
            await say(_event(error.as_dict()))
        await say(b"", more=False)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + as_json(content) + b"\n\n"


class _Refusal(JsonReply):
    """Sent at once, and the connection closed when the client has sent its body, or after a while: no client reads
    while it is sending."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = scope["state"].get("is_read", False)
        if is_read or scope["method"] in ("GET", "HEAD"):
            await super().__call__(scope, receive, send)
            return
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        is_read = any(name == b"expect" for name, _ in scope["headers"])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_SECONDS):
                left = LONGEST_REST
                while left > 0 and not is_read:
                    part = await receive()
                    left, is_read = left - len(part.get("body", b"")), not part.get("more_body", False)
        await send({"type": "http.response.body", "body": b""})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _Refusal(error.as_dict(), error.status)


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        return await _refused(request, ApiError(405, f"{path} is asked by {'POST' if path in CALLS else 'GET'}"))
    return await _refused(
        request, ApiError(error.status_code, f"there is nothing at {path}; there are: {', '.join(CALLS)}")
    )


async def _broken(request: Request, error: Exception) -> Response:
    """A bug of ours must not look like a network error."""
    return as_reply(ApiError(500, f"{type(error).__name__}: {error}"))
