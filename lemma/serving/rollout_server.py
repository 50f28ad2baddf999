"""`lemma serve MODEL --rollouts`: a generation server for trainers, which bring the weights and read token ids."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lemma.core.errors import UserError
from lemma.core.events import Sink, silent
from lemma.engines.protocol import EngineError
from lemma.engines.remote.rollout_wire import (
    END,
    GENERATE,
    LOAD,
    PROBE,
    WEIGHTS,
    completion_as_json,
    request_of,
)
from lemma.engines.remote.server_client import LINES, SERVED
from lemma.engines.remote.server_guard import Guard, end_with_parent
from lemma.serving.http_server import LOOPBACK, HttpServer, JsonReply, as_json, as_reply
from lemma.serving.openai_app import parsed, read_body
from lemma.serving.rollout_host import Event, RolloutHost, Sample, Work
from lemma.serving.wire_errors import ApiError

LONGEST_BODY = 2**30


def rollout_app(host: RolloutHost) -> Guard:
    """Everything is behind the guard: who does not have the key learns nothing, and no body of theirs is read."""

    async def health(request: Request) -> Response:
        return JsonReply({"status": "ok"})

    async def models(request: Request) -> Response:
        return JsonReply({"data": [{"id": SERVED}]})

    def ordered(what: Callable[[dict[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            order = await _order(request)
            try:
                return JsonReply(await asyncio.wrap_future(host.order(lambda: what(order))))
            except (UserError, KeyError, TypeError, ValueError, OSError) as error:
                raise ApiError(400, str(error)) from error

        return answer

    async def generated(request: Request) -> Response:
        order, loop = await _order(request), asyncio.get_running_loop()
        events = asyncio.Queue[Event]()

        def put(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the server has been closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        work = _work_of(order, put)
        host.submit(work)
        return StreamingResponse(_lines(host, work, events), media_type=LINES)

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route(LOAD, ordered(host.load), methods=["POST"]),
        Route(WEIGHTS, ordered(host.take_weights), methods=["POST"]),
        Route(PROBE, ordered(host.probe), methods=["POST"]),
        Route(END, ordered(lambda order: host.end(str(order["session"]))), methods=["POST"]),
        Route(GENERATE, generated, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={ApiError: _refused}))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return as_reply(error)


async def _order(request: Request) -> dict[str, Any]:
    content = parsed(await read_body(request, LONGEST_BODY))
    if not isinstance(content, dict):
        raise ApiError(400, "the body is not a JSON object")
    return content


def _work_of(order: dict[str, Any], put: Callable[[Event], None]) -> Work:
    try:
        return Work(
            session=order["session"],
            start=int(order["start"]),
            is_whole=bool(order["is_whole"]),
            batches=[[request_of(one) for one in batch] for batch in order["batches"]],
            model=str(order["id"]),
            version=int(order["version"]),
            put=put,
        )
    except (KeyError, TypeError, ValueError, EngineError) as error:
        raise ApiError(400, str(error)) from error


async def _lines(host: RolloutHost, work: Work, events: asyncio.Queue[Event]) -> AsyncIterator[bytes]:
    """A line for each event. Whoever goes away before the end wants no more."""
    try:
        while (event := await events.get()) is not None:
            yield as_json(_as_line(event)) + b"\n"
    finally:
        host.drop(work)


def _as_line(event: Event) -> Any:
    if isinstance(event, Sample):
        return completion_as_json(event.completion) | {"worked": event.worked}
    if isinstance(event, ApiError):
        return {"error": str(event)}
    return event


def serve_rollouts(
    model: str | None, address: str, port: int, sink: Sink = silent, say: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until the process ends. `say` gets the address."""
    host = RolloutHost(sink, model)
    server = HttpServer(rollout_app(host), address, port).start()
    try:
        say(server.address)
        host.run(lambda: not server.is_open)
    finally:
        server.close()


def main() -> None:
    """A server that a trainer starts on its own machine: it ends with the trainer."""
    parser = argparse.ArgumentParser(prog="python -m lemma.serving.rollout_server")
    parser.add_argument("--port", type=int, required=True)
    end_with_parent()
    serve_rollouts(None, LOOPBACK[0], parser.parse_args().port)


if __name__ == "__main__":
    main()
