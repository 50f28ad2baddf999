"""Engines turn prompts into completions: native (the trainer's own modules), vLLM, and transformers for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lemma.core.events import Said, Sink, silent
from lemma.engines.engine_options import ENGINES, EngineOptions, NativeOptions, TransformersOptions, VllmEngineOptions

if TYPE_CHECKING:
    from lemma.engines.native.engine import NativeEngine
    from lemma.engines.protocol import Engine
    from lemma.engines.transformers_engine import TransformersEngine
    from lemma.models.model_options import Precision
    from lemma.models.policy import Policy

# How much longer the transformers engine takes for 1,319 answers of a 135M model on one H200 (docs/lab-notes.md).
SLOWER = 15

__all__ = ["ENGINES", "EngineOptions", "make_engine", "open_engine"]


def make_engine(options: EngineOptions, policy: Policy, seed: int, sink: Sink = silent) -> Engine:
    """The engine that the options name, on this policy. If the native engine does not compute the same as
    transformers for this model, it falls back to the transformers engine, and the sink is told."""
    from lemma.engines.protocol import EngineError
    from lemma.engines.transformers_engine import TransformersEngine

    if isinstance(options, VllmEngineOptions):
        from lemma.engines.vllm import make_vllm

        return make_vllm(policy, seed, options)
    if isinstance(options, TransformersOptions):
        return TransformersEngine(policy, seed, batch=options.batch)
    assert isinstance(options, NativeOptions)
    if options.servers:
        from lemma.engines.remote.remote_engine import RemoteEngine

        return RemoteEngine(policy, seed, options)
    try:
        return _native(options, policy, seed)
    except EngineError as error:
        sink(_instead(error))
        return TransformersEngine(policy, seed, in_place_of="native")


def open_engine(
    path: str,
    device: str = "auto",
    seed: int = 0,
    sink: Sink = silent,
    options: NativeOptions | None = None,
    precision: Precision | None = None,
) -> tuple[Policy, NativeEngine | TransformersEngine]:
    """A model for generation, loaded from anywhere, and the fastest engine that can run it."""
    from lemma.engines.transformers_engine import TransformersEngine
    from lemma.models.load_model import load_policy

    opened = _open_native(path, device, seed, options or NativeOptions(), precision)
    if not isinstance(opened, Said):
        return opened
    policy = load_policy(path, device, precision, plain=True)
    sink(opened)
    return policy, TransformersEngine(policy, seed, in_place_of="native")


def _open_native(
    path: str, device: str, seed: int, options: NativeOptions, precision: Precision | None
) -> tuple[Policy, NativeEngine] | Said:
    """The model with the native engine, or the reason why not; in that case its weights have been freed."""
    from lemma.core.errors import UserError
    from lemma.models.load_model import load_policy

    try:
        policy = load_policy(path, device, precision)
        return policy, _native(options, policy, seed)
    except UserError as error:
        return _instead(error)


def _native(options: NativeOptions, policy: Policy, seed: int) -> NativeEngine:
    from lemma.engines.native.engine import NativeEngine
    from lemma.engines.native.engine_probe import probe
    from lemma.engines.native.sizes import bytes_per_token

    probe(policy)
    tokens = options.cache_tokens
    if tokens is None and options.cache_gib is not None:
        tokens = max(1, int(options.cache_gib * 2**30 / bytes_per_token(policy)))
    return NativeEngine(
        policy,
        seed,
        cache_tokens=tokens,
        max_sequences=options.sequences,
        prefill_tokens=options.prefill_tokens,
        share_prefixes=options.share_prefixes,
        use_graphs=None if options.graphs else False,
        burst=options.burst,
    )


def _instead(error: Exception) -> Said:
    reason = getattr(error, "problem", str(error))
    return Said(f"{reason}; the transformers engine takes its place, some {SLOWER} times slower on a GPU", "warning")
