"""Messages between learner ranks and speakers, the generation-only ranks.

A *session* is the requests of one slot, or all of them if there is one slot. A speaker has one at a time, so that its
batches, and with them the last bit of a log-probability, are those of a process that does everything itself. With
`lag: flying` a session is all that a learner wants, of any speaker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Completion, Key, Request
from lemma.engines.remote.weights_probe import ProbeScores
from lemma.engines.weight_broadcast import Layout
from lemma.models.model_options import ModelOptions

# --- from learners ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Load the model and make an engine for it. `cache` is how many tokens its KV cache should hold, if there is room;
    `layout` is that of the weights that will be sent."""

    model: ModelOptions
    start_from: Path | None
    device: str
    seed: int
    engine: NativeOptions
    cache: int | None
    layout: Layout
    threads: int
    is_deterministic: bool


@dataclass(frozen=True)
class TakeWeights:
    """Weights are broadcast next. The prompt is for the probe."""

    version: int
    prompt: Sequence[int]


@dataclass(frozen=True)
class Begin:
    """Start a session. If `is_whole`, no more requests follow; otherwise it lasts until `End`. Those with `is_partial`
    run together, and continue with new weights."""

    session: int
    requests: Sequence[Request]
    is_whole: bool
    resets_prefix_cache: bool
    is_partial: bool = False


@dataclass(frozen=True)
class More:
    session: int
    requests: Sequence[Request] = ()
    cancelled: Sequence[Key] = ()


@dataclass(frozen=True)
class End:
    """Nothing more of this session is wanted."""

    session: int


@dataclass(frozen=True)
class Unload:
    """The engine and the model are not needed any more."""


@dataclass(frozen=True)
class Bye:
    """This learner is done."""


# --- from speakers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeakerReady:
    """The speaker's engine; see `lemma.engines.protocol.Engine`."""

    name: str
    context: int
    in_place_of: str | None
    capacity: int | None
    updates_in_flight: bool


@dataclass(frozen=True)
class Taken:
    """The weights are in place: the engine's scores of the probe."""

    scores: ProbeScores


@dataclass(frozen=True)
class SpokenSample:
    """A sample of a session is finished; `seconds` is the engine's working time since its last message."""

    session: int
    completion: Completion
    seconds: float


@dataclass(frozen=True)
class Heartbeat:
    """This speaker is generating, for some session."""


@dataclass(frozen=True)
class Failed:
    """An error, as `lemma.core.ranks.portable` writes it: of a session, or of the last command."""

    error: bytes
    session: int | None = None


@dataclass(frozen=True)
class StopAsked:
    """This rank was asked by a signal to end the run."""
