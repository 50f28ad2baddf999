"""Messages over a stream socket: four bytes of length, then JSON."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

# Saved changes of a task are far smaller.
LONGEST = 64 * 2**20


def send(connection: socket.socket, message: Any) -> None:
    # Half a surrogate pair is no text; JSON's own escapes carry it all the same.
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """The next message; EOFError where the other side is gone, ValueError where it is not one."""
    (length,) = struct.unpack("!I", _exactly(connection, 4))
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 2**20))
        if not part:
            raise EOFError("the connection was closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
