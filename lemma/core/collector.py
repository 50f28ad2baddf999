"""Keeps Python's garbage collector away from long-lived objects: torch and transformers create 400,000 of them, and one
pass over these takes a quarter of a second."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_aside(*, collect: bool = True) -> Iterator[None]:
    """Inside `with`, the collector skips all objects that existed before. Within another one it goes on as it is.

    With `collect`, garbage is collected first, since it may hold the tensors of an earlier run.
    """
    if collect:
        gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
