"""Requests sharded over ranks, each of which has its own engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lemma.core.ranks import gather_to_leader, own_slots, slots, together
from lemma.engines.protocol import Completion, Engine, Request

PLACE = "completions"


def sharded_completions(engine: Engine, requests: Sequence[Request]) -> Iterator[Completion]:
    """The completions of all requests, as each finishes. With several ranks the first one gets them once all are
    finished, and the others get none; the slot of a request depends on its index only."""
    if slots() == 1:
        yield from _completions(engine, requests)
        return
    mine: list[Completion] = []

    def own_part() -> None:
        for slot in own_slots():
            with engine.slot(slot):
                mine.extend(_completions(engine, requests[slot :: slots()]))

    together(own_part, PLACE)
    for part in gather_to_leader(mine, PLACE):
        yield from part


def _completions(engine: Engine, requests: Sequence[Request]) -> Iterator[Completion]:
    for request in requests:
        engine.submit(request)
    yield from engine.completions()
