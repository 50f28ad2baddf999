"""`lemma watch`: the same page, served on this machine only, from a run folder that is being written.

Every path begins with a secret token that is shown only to the user who started the command. Nothing is written,
neither to the run nor anywhere else; each request reads what is new since the last one.
"""

from __future__ import annotations

import gzip
import hmac
import json
import secrets
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from lemma.core.errors import UserError
from lemma.reports.page import make_page
from lemma.reports.page_data import PageData
from lemma.reports.run_reader import RunReader

LOOPBACK = "127.0.0.1"
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


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self._path() == "":
            self._send(200, self.server.content.page.encode(), "text/html; charset=utf-8")
        else:
            self._refuse()

    def do_POST(self) -> None:
        answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "data": self.server.content.data,
            "samples": self.server.content.samples,
        }
        answer = answers.get(self._path() or "")
        size = self.headers.get("Content-Length", "0")
        if answer is None or not size.isdigit() or int(size) > LONGEST_QUESTION:
            self._refuse()
            return
        try:
            question = json.loads(self.rfile.read(int(size)))
            reply = answer(question if isinstance(question, dict) else {})
        except (ValueError, KeyError, IndexError, TypeError, OSError, UserError):
            self._send(404, b"there is nothing of this name, or it cannot be read")
            return
        data = json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        self._send(200, data, "application/json; charset=utf-8")

    def _path(self) -> str | None:
        """The path after the token; None without the right token, and for requests of other sites."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        token, _, rest = urlsplit(self.path).path.removeprefix("/").partition("/")
        known = hmac.compare_digest(token.encode(), self.server.token.encode())
        return rest if known and host in (LOOPBACK, "localhost") else None

    def _refuse(self) -> None:
        self.close_connection = True
        self._send(403, b"open the address that lemma watch printed, with its token")

    def _send(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        if len(body) > 2000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, packed = gzip.compress(body, 4), True
        else:
            packed = False
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal belongs to the run."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, content: LivePage, port: int):
        self.content, self.token = content, secrets.token_urlsafe(16)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used ({error.strerror})", fix="write --port and another number, or leave it out"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that disconnects in the middle of an answer is not an error."""


class Watch:
    """A server in its own thread, from `start` to `close`."""

    def __init__(self, runs: Sequence[RunReader], words: Sequence[str], port: int = 0):
        self._server = _Server(LivePage(runs, words), port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="lemma-watch", daemon=True)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_address[1]}/{self._server.token}/"

    def start(self) -> Watch:
        self._thread.start()
        return self

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
