"""Messages as bytes: four bytes of length, then JSON. Nothing that a model wrote is ever unpickled.

Python's own library only: programs in a sandbox and AppWorld's own Python import this file by its bare name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

LENGTH = 4
# Maximum length of a message; anything longer is not one of ours.
MOST = 2**28


class NotAFrame(ValueError):
    """Bytes that are no message."""


def pack(content: Any) -> bytes:
    data = json.dumps(content, default=_plain).encode()
    return len(data).to_bytes(LENGTH, "big") + data


def unpack(buffer: bytearray, most: int = MOST) -> Iterator[Any]:
    """Every complete message at the start of the buffer, which is removed from it."""
    while len(buffer) >= LENGTH:
        end = LENGTH + _length(buffer[:LENGTH], most)
        if len(buffer) < end:
            return
        data = bytes(buffer[LENGTH:end])
        del buffer[:end]
        yield _content(data)


def receive(read: Callable[[int], bytes], most: int = MOST) -> Any:
    """The next message from a source that blocks; EOFError where it has ended."""
    return _content(_exactly(read, _length(_exactly(read, LENGTH), most)))


def _length(data: bytes | bytearray, most: int) -> int:
    length = int.from_bytes(data, "big")
    if length > most:
        raise NotAFrame(f"a message of {length} bytes")
    return length


def _content(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotAFrame("it is no JSON") from error


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = read(min(count - len(data), 2**20))
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return bytes(data)


def _plain(value: Any) -> Any:
    """What JSON cannot encode: numpy arrays and numbers become lists and numbers, everything else a string."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
