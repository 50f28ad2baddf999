"""The HTTP server: routes, keys, streams, and detecting disconnected clients. One thread per connection."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from lemma.core.errors import UserError
from lemma.serving.exchange import Exchange, Host
from lemma.serving.wire_errors import ApiError
from lemma.serving.wire_replies import ReplyWriter
from lemma.serving.wire_requests import Kind, WireCall, read_call

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
LONGEST_BODY = 64 * 2**20
# If a request is refused before its body was read, at most this much is still read, for this long: a client does not
# read the response while it is sending.
LONGEST_REST, REST_SECONDS = 4 * LONGEST_BODY, 5.0
# Seconds after which a silent connection is closed, and for answers to finish when the server closes.
SILENT_SECONDS = 600.0
LAST_SECONDS = 2.0
CALLS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "text"}


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = SILENT_SECONDS
    server_version, sys_version = "lemma", ""
    _is_unread = False  # whether the body of the request has not been read yet

    def do_GET(self) -> None:
        self._is_unread = self.headers.get("Content-Length", "0") != "0"
        self.close_connection = self.close_connection or self._is_unread
        with self._answering():
            path = self._path()
            host = self.server.host
            if path == "/health":
                self._send(200, {"status": "ok", "requests": host.driver.active})
                return
            self._caller()
            model = {"id": host.name, "object": "model", "created": self.server.created, "owned_by": "lemma"}
            if path == "/v1/models":
                self._send(200, {"object": "list", "data": [model]})
            elif path.startswith("/v1/models/") and host.serves(unquote(path.removeprefix("/v1/models/"))):
                self._send(200, model)
            elif path in CALLS:
                raise ApiError(405, f"{path} is asked by POST")
            else:
                raise ApiError(404, f"there is nothing at {path}")

    def do_POST(self) -> None:
        self._is_unread = True
        with self._answering():
            path = self._path()
            if path not in CALLS:
                raise ApiError(404, f"there is nothing at {path}; there are: {', '.join(CALLS)}")
            caller = self._caller()
            asked = read_call(CALLS[path], _json(self._body()))
            if asked.model is not None and not self.server.host.serves(asked.model):
                raise ApiError(
                    404, f"there is no model '{asked.model}'; there is: {self.server.host.name}", param="model",
                    code="model_not_found",
                )  # fmt: skip
            try:
                exchange = Exchange(self.server.host, caller, asked)
            except UserError as error:
                raise ApiError.of(error) from error
            try:
                writer = ReplyWriter(exchange, self.server.host.dialogue, asked.model or self.server.host.name)
                self._stream(exchange, writer, asked) if asked.stream else self._whole(exchange, writer)
            finally:
                exchange.close()

    # --- answers ---------------------------------------------------------------------------------------------------

    def _whole(self, exchange: Exchange, writer: ReplyWriter) -> None:
        for _ in exchange.follow(self._is_gone):
            pass
        self._send(200, writer.whole())

    def _stream(self, exchange: Exchange, writer: ReplyWriter, asked: WireCall) -> None:
        """Events as they arrive. An error before the first event has its own HTTP status, a later one is an event."""
        news = exchange.follow(self._is_gone)
        first = next(news)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for piece in writer.pieces(first):
                self._event(piece)
            for one in news:
                for piece in writer.pieces(one):
                    self._event(piece)
            if asked.stream_usage:
                self._event(writer.usage_piece())
            self._chunk(b"data: [DONE]\n\n")
        except ApiError as error:
            self._event(error.as_dict())
            self.close_connection = True
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, content: dict[str, Any]) -> None:
        self._chunk(b"data: " + _written(content) + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = _written(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Errors become responses; a disconnected client gets none."""
        with self.server.busy():
            try:
                yield
            except ApiError as error:
                # Otherwise the unread body would be taken for the next request.
                self.close_connection = self.close_connection or self._is_unread
                with contextlib.suppress(OSError):
                    self._send(error.status, error.as_dict())
                    if self._is_unread:
                        self._pass_over()
            except (ConnectionError, TimeoutError):
                self.close_connection = True
            except Exception as error:  # noqa: BLE001  (a bug of ours must not look like a network error)
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self._send(500, ApiError(500, f"{type(error).__name__}: {error}").as_dict())

    # --- questions -------------------------------------------------------------------------------------------------

    def _path(self) -> str:
        """The path of the request. A loopback server accepts only its own names in the Host header: a page of another
        site, open in a browser on this machine, may send requests, but under its own name (DNS rebinding)."""
        try:
            name, path = urlsplit(f"//{self.headers.get('Host', '')}").hostname, urlsplit(self.path).path
        except ValueError as error:
            raise ApiError(400, f"this is no address: {error}") from error
        if self.server.is_loopback and name not in LOOPBACK:
            raise ApiError(403, f"this server does not answer for '{name or ''}'")
        return path.rstrip("/")

    def _body(self) -> bytes:
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit()):
            raise ApiError(411, "the request does not say how long it is")
        if int(size) > LONGEST_BODY:
            raise ApiError(413, f"the request has more than {LONGEST_BODY} bytes")
        if self.headers.get_content_type() != "application/json":
            raise ApiError(415, "the request has another type; send the header Content-Type: application/json")
        body = self.rfile.read(int(size))
        self._is_unread = False
        return body

    def _pass_over(self) -> None:
        """Discard the rest of the request, so that the client gets to read the response."""
        self.connection.shutdown(socket.SHUT_WR)
        until, left = time.monotonic() + REST_SECONDS, LONGEST_REST
        while left > 0 and (seconds := until - time.monotonic()) > 0:
            self.connection.settimeout(seconds)
            data = self.connection.recv(2**16)
            if not data:
                return
            left -= len(data)

    def _caller(self) -> Any:
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        return self.server.host.caller(
            key.strip() if scheme.lower() == "bearer" else "", self.headers.get("X-Session-ID")
        )

    def _is_gone(self) -> bool:
        looker = select.poll()
        looker.register(self.connection, select.POLLIN)
        try:
            return bool(looker.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal belongs to whoever started the server."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by the base class for malformed requests and unknown methods."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self._send(code, ApiError(code, message or "this is not a request").as_dict())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: Host, address: str, port: int):
        self.host, self.created = host, int(time.time())
        self.is_loopback = address in LOOPBACK
        self._open: set[socket.socket] = set()
        self._busy = 0
        self._lock = threading.Condition()
        if ":" in address:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((address, port), _Handler)
        except OSError as error:
            raise UserError(
                f"{address} port {port} cannot be used ({error.strerror})",
                fix="write --port and another number, or leave it out",
            ) from error

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                self._lock.notify_all()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects in the middle of an answer is not an error."""

    def end(self) -> None:
        """Accept no more connections, give running answers a moment to finish, and close every connection."""
        self.shutdown()
        self.server_close()
        with self._lock:
            self._lock.wait_for(lambda: self._busy == 0, LAST_SECONDS)
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class HttpServer:
    """A server in its own thread, from `start` to `close`."""

    def __init__(self, host: Host, address: str = LOOPBACK[0], port: int = 0):
        self._server = _Server(host, address, port)
        self._address = address
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="lemma-serve", daemon=True)

    @property
    def url(self) -> str:
        """The `base_url` for clients."""
        name = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{name}:{self._server.server_address[1]}/v1"

    def start(self) -> HttpServer:
        self._thread.start()
        return self

    def close(self) -> None:
        self._server.end()


def _json(body: bytes) -> Any:
    """The parsed body; lone surrogates become question marks, since no tokenizer accepts them."""
    try:
        content = json.loads(body)
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            content = json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
        return content
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the body is not JSON") from error


def _written(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
