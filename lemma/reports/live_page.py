"""`lemma watch`: the same page, served on this machine only, from a run folder that is being written.

Every path begins with a secret token that is shown only to the user who started the command. Nothing is written,
neither to the run nor anywhere else; each request reads what is new since the last one.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lemma.core.errors import UserError
from lemma.reports.page import make_page
from lemma.reports.page_data import PageData
from lemma.reports.report_file import DAMAGE
from lemma.reports.run_reader import RunReader
from lemma.serving.http_server import HttpServer, as_json

# The page's own requests are short; anything longer is not from the page.
LONGEST_QUESTION = 1_000_000


class LivePage:
    """The content that the server sends: the page, its data, the samples of a step."""

    def __init__(self, runs: Sequence[RunReader], words: Sequence[str]):
        self._runs = list(runs)
        self._data = PageData(runs, words)
        self._lock = threading.Lock()
        self.page = make_page(", ".join(run.name for run in runs), "", {}, live=True)

    def data(self, question: dict[str, Any]) -> dict[str, Any]:
        seen = question.get("seen")
        if not isinstance(seen, list) or len(seen) != len(self._runs):
            seen = [None] * len(self._runs)
        with self._lock:
            return self._data.since([one if isinstance(one, dict) else None for one in seen])

    def samples(self, question: dict[str, Any]) -> dict[str, Any]:
        """Raises KeyError for an unknown name; only samples in the run folder have names."""
        run = self._runs[int(question["run"])]
        with self._lock:
            place = next((one for one in run.chunks() if one.key == question["key"]), None)
            if place is None:
                raise KeyError(question["key"])
            return run.read(place)


def live_app(content: LivePage, token: str) -> Starlette:
    """The page at `/TOKEN/`, its data at `/TOKEN/data` and `/TOKEN/samples`; anything else is refused."""

    def is_known(request: Request) -> bool:
        return hmac.compare_digest(request.path_params["token"].encode(), token.encode())

    async def page(request: Request) -> Response:
        return _reply(content.page, "text/html") if is_known(request) else _refusal()

    def answer(ask: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def reply(request: Request) -> Response:
            if not is_known(request):
                return _refusal()
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > LONGEST_QUESTION:
                    return _refusal()
            try:
                question = json.loads(body)
            except (ValueError, RecursionError):
                return _reply("the question is not JSON", status=400)
            try:
                found = await to_thread.run_sync(ask, question if isinstance(question, dict) else {})
            except (OSError, UserError, RecursionError, *DAMAGE):
                return _reply("there is nothing of this name, or it cannot be read", status=404)
            return _reply(as_json(found), "application/json")

        return reply

    async def refuse(request: Request, error: Exception) -> Response:
        return _refusal()

    app = Starlette(
        routes=[
            Route("/{token}/", page),
            Route("/{token}/data", answer(content.data), methods=["POST"]),
            Route("/{token}/samples", answer(content.samples), methods=["POST"]),
        ],
        middleware=[Middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)],
        exception_handlers={HTTPException: refuse},
    )
    app.router.redirect_slashes = False
    return app


def _reply(body: str | bytes, kind: str = "text/plain", status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return Response(body, status, headers, f"{kind}; charset=utf-8")


def _refusal() -> Response:
    return _reply("open the address that lemma watch printed, with its token", status=403)


class Watch:
    """A server in its own thread, from `start` to `close`."""

    def __init__(self, runs: Sequence[RunReader], words: Sequence[str], port: int = 0):
        self._token = secrets.token_urlsafe(16)
        self._server = HttpServer(live_app(LivePage(runs, words), self._token), port=port)

    @property
    def address(self) -> str:
        return f"{self._server.address}/{self._token}/"

    def start(self) -> Watch:
        self._server.start()
        return self

    def close(self) -> None:
        self._server.close()
