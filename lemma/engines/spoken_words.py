"""What ranks that learn and ranks that only speak say to each other over their connections.

A *session* is a slot's part of the work, or all of it where there is one slot. A speaker has one at a time, so that its
batches, and with them the last bit of a log-probability, are those of a process that does everything itself. Where
responses fly, a session is all that a learner wants, of any speaker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Completion, Key, Request
from lemma.engines.sent_weights import Layout
from lemma.engines.vllm.vllm_probe import ProbeScores
from lemma.models.model_options import ModelOptions

# --- what learners say -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Make the model and an engine for it. `cache` is how many tokens its cache should hold, if there is room; `layout`
    is that of the weights that will be sent."""

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
    """A session begins. One that `is_whole` gets nothing more; another one lasts until it is ended. Those that fly are
    served together, and go on with new weights."""

    session: int
    requests: Sequence[Request]
    is_whole: bool
    forgets_prompts: bool
    flies: bool = False


@dataclass(frozen=True)
class More:
    session: int
    requests: Sequence[Request] = ()
    cancelled: Sequence[Key] = ()


@dataclass(frozen=True)
class End:
    """Nobody wants anything more of this session."""

    session: int


@dataclass(frozen=True)
class Unload:
    """The engine and the model are not needed any more."""


@dataclass(frozen=True)
class Bye:
    """This learner is done."""


# --- what speakers say -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeakerReady:
    """The engine that speaks; see `lemma.engines.protocol.Engine`."""

    name: str
    context: int
    in_place_of: str | None
    room: int | None
    updates_in_flight: bool


@dataclass(frozen=True)
class Taken:
    """The weights are in place: what the engine drew with them, or says of the prompt, for the probe."""

    scores: ProbeScores


@dataclass(frozen=True)
class SpokenSample:
    """A sample of a session is finished; `seconds` are those that the engine worked since it said something."""

    session: int
    completion: Completion
    seconds: float


@dataclass(frozen=True)
class AtWork:
    """This speaker generates, for whomever."""


@dataclass(frozen=True)
class Failed:
    """An error, as `lemma.core.ranks.portable` writes it: of a session, or of what was asked for last."""

    error: bytes
    session: int | None = None


@dataclass(frozen=True)
class StopAsked:
    """This rank was asked by a signal to end the run."""
