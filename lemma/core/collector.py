"""Python's garbage collector, kept off what stays anyway: torch and transformers leave 400,000 objects behind, and one
pass over them takes a quarter of a second."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_aside() -> Iterator[None]:
    """Within `with`, the collector does not look at what there was before, except for garbage, which goes now: it may
    hold the tensors of an earlier run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
