"""A WebSocket client with only the standard library: text messages, one at a time, each with a deadline."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import time
from urllib.parse import urlsplit

ACCEPT = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
LARGEST = 64 << 20


class WebSocket:
    """One connection. Raises `ConnectionError` if the other side is gone, `TimeoutError` if it is late."""

    def __init__(self, url: str, seconds: float):
        """To ws://host:port/path, or wss:// with TLS."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "wss" else 80)
        self._deadline = time.monotonic() + seconds
        self._buffer = b""
        self._socket: socket.socket = socket.create_connection((host, port), seconds)
        try:
            if parts.scheme == "wss":
                import ssl

                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            self._shake_hands(path, f"{host}:{port}")
        except BaseException:
            self._socket.close()
            raise

    def ask(self, text: str, seconds: float) -> str:
        """Send a message and wait for the next one."""
        self._deadline = time.monotonic() + seconds
        self._send(TEXT, text.encode())
        return self.receive(seconds)

    def receive(self, seconds: float) -> str:
        """The next message, with its fragments joined."""
        self._deadline = time.monotonic() + seconds
        whole = b""
        while True:
            is_last, kind, data = self._frame()
            if kind == PING:
                self._send(PONG, data)
            elif kind == CLOSE:
                raise ConnectionError("the server closed the connection")
            elif kind != PONG:
                whole += data
                if len(whole) > LARGEST:
                    raise ConnectionError("the server sends a message without end")
                if is_last:
                    return whole.decode("utf-8", "replace")

    def close(self) -> None:
        try:
            self._deadline = time.monotonic() + 1
            self._send(CLOSE, b"\x03\xe8")
        except OSError:
            pass
        self._socket.close()

    def _shake_hands(self, path: str, host: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self._socket.settimeout(self._left())
        self._socket.sendall("\r\n".join(lines).encode())
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        given = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        wanted = base64.b64encode(hashlib.sha1((key + ACCEPT).encode()).digest()).decode()
        if " 101 " not in f"{status} " or given.get("sec-websocket-accept") != wanted:
            raise ConnectionError(f"no WebSocket there: {status[:100]}")

    def _send(self, kind: int, data: bytes) -> None:
        """One masked frame, as a client must send it."""
        size = len(data)
        if size < 126:
            head = bytes([0x80 | kind, 0x80 | size])
        elif size < 1 << 16:
            head = bytes([0x80 | kind, 0x80 | 126]) + size.to_bytes(2, "big")
        else:
            head = bytes([0x80 | kind, 0x80 | 127]) + size.to_bytes(8, "big")
        mask = os.urandom(4)
        whole = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        self._socket.settimeout(self._left())
        self._socket.sendall(head + mask + whole.to_bytes(size, "big"))

    def _frame(self) -> tuple[bool, int, bytes]:
        first, second = self._take(2)
        size = second & 0x7F
        if size > 125:
            size = int.from_bytes(self._take(2 if size == 126 else 8), "big")
        if second & 0x80 or size > LARGEST:
            raise ConnectionError("the server does not speak WebSocket")
        return bool(first & 0x80), first & 0x0F, self._take(size)

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _more(self) -> None:
        self._socket.settimeout(self._left())
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server is gone")
        self._buffer += data
        if len(self._buffer) > 2 * LARGEST:
            raise ConnectionError("the server sends a message without end")

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server did not answer in time")
        return left
