"""The client of one generation server, on any machine: calls, asynchronous completions, file uploads."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemma.engines.protocol import EngineError
from lemma.engines.remote.server_guard import FILES_PATH, HEADER

SERVED = "lemma"  # the name of the base model
CALL_SECONDS = 300.0  # for everything but completions
WELL_SECONDS = 10.0
IDLE_SECONDS = 60  # for unused connections; the server's limit is ten times longer, so it never closes one in use
CHUNK_BYTES = 1 << 20  # of a file, sent at a time
LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class ServerReply:
    """An answer, or an error instead of it. `source` is the client that asked."""

    name: str
    status: int
    body: Any
    error: str = ""
    source: Any = None


class ServerClient:
    """A client of the server at this address, with its key. Several clients may share one queue for replies."""

    def __init__(self, url: str, key: str, replies: queue.Queue[ServerReply] | None = None):
        import httpx

        self.url, self.key = url.rstrip("/"), key
        settings: dict[str, Any] = {"base_url": self.url, "headers": {HEADER: key}, "trust_env": False}
        self._http = httpx.Client(**settings, timeout=CALL_SECONDS)
        self.replies: queue.Queue[ServerReply] = queue.Queue() if replies is None else replies
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-client", daemon=True)
        self._thread.start()
        self._client = httpx.AsyncClient(
            **settings,
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS),
        )

    @property
    def place(self) -> str:
        """Its name in messages."""
        return self.url

    def is_alive(self) -> bool:
        """False only if the server is certainly gone."""
        return True

    def is_well(self, seconds: float = WELL_SECONDS) -> bool:
        """Whether it answers a health check."""
        import httpx

        try:
            return self.is_alive() and self._http.get("/health", timeout=seconds).status_code == 200
        except httpx.HTTPError:
            return False

    def refusal(self, seconds: float = WELL_SECONDS) -> str | None:
        """Why this server cannot be used, if it cannot: unreachable, another key, or not started by Lemma."""
        import httpx

        try:
            response = self._http.get("/v1/models", timeout=seconds)
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        if response.status_code == 401:
            return "it knows another key"
        models = response.json()["data"] if response.status_code == 200 else []
        if not any(model["id"] == SERVED for model in models):
            return "it was not started by Lemma"
        return None if self.is_well(seconds) else "not well"

    def call(self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CALL_SECONDS) -> Any:
        """The answer of an endpoint. Raises ConnectionError if the server cannot be reached."""
        import httpx

        try:
            return self._answer(path, self._http.post(path, json=body, timeout=seconds))
        except httpx.TimeoutException as error:
            raise EngineError(f"{self.place} did not answer {path} within {seconds:g} seconds") from error
        except httpx.HTTPError as error:
            raise ConnectionError(str(error)) from error

    def _answer(self, path: str, response: Any) -> Any:
        if response.status_code >= 400:
            raise EngineError(f"{self.place} refused {path}: {_message(response.text)}")
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json else None

    def rpc(self, method: str, *arguments: str) -> Any:
        """Call a method of the workers; the result of the first one."""
        return self.call("/collective_rpc", {"method": method, "args": list(arguments)})["results"][0]

    def send(self, files: Sequence[Path], folder: str) -> str:
        """Upload files, one at a time, to a folder of the server; returns its path there."""
        there = ""
        for file in files:
            there = self._file("PUT", f"{folder}/{file.name}", _pieces(file))["folder"]
        return there

    def forget(self, folder: str) -> None:
        """Remove an uploaded folder."""
        self._file("DELETE", f"{folder}/all")

    def _file(self, method: str, name: str, content: Iterator[bytes] | None = None) -> Any:
        import httpx

        path = FILES_PATH + name
        try:
            return self._answer(path, self._http.request(method, path, content=content))
        except httpx.HTTPError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    def ask(self, name: str, path: str, body: Mapping[str, Any]) -> None:
        """Request completions; what comes is put into `replies`. An answer in lines is one reply for each, and a last
        one without a body."""
        self._loop.call_soon_threadsafe(self._begin, name, path, dict(body))

    def drop(self, name: str) -> None:
        """Close the connection of a request, which cancels it in the server."""

        def cancel() -> None:
            task = self._tasks.pop(name, None)
            if task is not None:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def last_words(self) -> str:
        """What is known about why it ended."""
        return f"{self.url} does not answer"

    def close(self) -> None:
        """Close all connections."""
        self._http.close()
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(timeout=10.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10.0)

    async def _shut(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _begin(self, name: str, path: str, body: dict[str, Any]) -> None:
        self._tasks[name] = self._loop.create_task(self._complete(name, path, body))

    async def _complete(self, name: str, path: str, body: dict[str, Any]) -> None:
        import httpx

        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code == 200 and response.headers.get("content-type", "").startswith(LINES):
                    async for line in response.aiter_lines():
                        self.replies.put(ServerReply(name, 200, json.loads(line), source=self))
                    reply = ServerReply(name, 200, None, source=self)
                else:
                    text = (await response.aread()).decode()
                    is_good = response.status_code == 200
                    content, error = (json.loads(text), "") if is_good else (None, _message(text))
                    reply = ServerReply(name, response.status_code, content, error, self)
        except (httpx.HTTPError, OSError, ValueError) as failure:
            reply = ServerReply(name, 0, None, str(failure) or type(failure).__name__, self)
        self._tasks.pop(name, None)
        self.replies.put(reply)


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            yield piece


def _message(text: str) -> str:
    """The message in an error response."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip()[:300] or "no reason given"
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
