"""Transformers' kind of layer that may be computed again, imported without scikit-learn: where that is installed,
transformers loads it, for a second or more, for a way of decoding that nothing here uses."""

from __future__ import annotations

import sys

_is_first = "sklearn" not in sys.modules
if _is_first:
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # Python's own mark of what cannot be imported
try:
    from transformers.modeling_layers import GradientCheckpointingLayer
finally:
    if _is_first:
        del sys.modules["sklearn"]

__all__ = ["GradientCheckpointingLayer"]
