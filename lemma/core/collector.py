"""Keeps Python's garbage collector away from long-lived objects: torch and transformers create 400,000 of them, and one
pass over these takes a quarter of a second."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Inside `with`, many objects are made that stay, and the collector does not go through them again and again; in
    `set_aside`, it skips them afterwards as well."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count():
            gc.freeze()
        if is_on:
            gc.enable()


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
