"""One engine made of those of all ranks: the first rank asks, every rank generates for its slots.

Which slot a request belongs to follows from its place among those that were submitted together, so that what is
generated does not depend on the number of ranks. The rank that asks gets everything; the others serve it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from lemma.core.ranks import gather_over_ranks, is_leader, own_slots, portable, slots, together, world_size
from lemma.engines.protocol import Completion, Engine, Key, Listener, Request

T = TypeVar("T")
PLACE = "requests for an evaluation"


@dataclass(frozen=True)
class _Word:
    """What the first rank tells the others: requests to generate for, or that it is done and what came of it."""

    requests: Sequence[Request] | None = None
    result: Any = None
    trouble: bytes | None = None


def dealt_out(engine: Engine, work: Callable[[Engine], T]) -> T:
    """Have the first rank do `work` with an engine for which all ranks generate; all get what it found."""
    if world_size() == slots() == 1:
        return work(engine)
    return _lead(engine, work) if is_leader() else cast(T, _follow(engine))


def _lead(engine: Engine, work: Callable[[Engine], T]) -> T:
    try:
        result = work(_Dealt(engine))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        gather_over_ranks(_Word(trouble=portable(error)), PLACE)
        raise
    gather_over_ranks(_Word(result=result), PLACE)
    return result


def _follow(engine: Engine) -> Any:
    """Generate this rank's share of what the first one asks for, until it is done."""
    while True:
        word = gather_over_ranks(None, PLACE)[0]
        assert isinstance(word, _Word)
        if word.trouble is not None:
            raise pickle.loads(word.trouble)
        if word.requests is None:
            return word.result
        try:
            _generate_together(engine, word.requests)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 (the first rank hears of it too, and decides what becomes of it)
            continue


def _generate_together(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """The completions of all ranks, slot by slot."""

    def own_part() -> list[Completion]:
        completions: list[Completion] = []
        for slot in own_slots():
            engine.forget_prompts()
            for request in requests[slot :: slots()]:
                engine.submit(request)
            completions += engine.completions()
        return completions

    return [completion for part in together(own_part, "an evaluation") for completion in part]


class _Dealt(Engine):
    """The engine as the first rank sees it."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._submitted: list[Request] = []
        self.name, self.context, self.in_place_of = engine.name, engine.context, engine.in_place_of

    @property
    def room(self) -> int | None:
        return self._engine.room

    @property
    def tells(self) -> bool:  # type: ignore[override]
        return self._engine.tells

    @property
    def listen(self) -> Listener | None:
        return self._engine.listen

    @listen.setter
    def listen(self, listener: Listener | None) -> None:
        self._engine.listen = listener

    @property
    def meanwhile(self) -> Callable[[], AbstractContextManager[None]]:
        return self._engine.meanwhile

    @meanwhile.setter
    def meanwhile(self, entered: Callable[[], AbstractContextManager[None]]) -> None:
        self._engine.meanwhile = entered

    def submit(self, request: Request) -> None:
        self._submitted.append(request)

    def cancel(self, key: Key) -> None:
        self._submitted = [request for request in self._submitted if request.key != key]

    def completions(self) -> Iterator[Completion]:
        while self._submitted:
            requests, self._submitted = self._submitted, []
            gather_over_ranks(_Word(requests), PLACE)
            yield from _generate_together(self._engine, requests)

    def update_weights(self, version: int) -> None:
        raise AssertionError("the weights stay as they are while ranks generate together")

    def invalidate(self) -> None:
        raise AssertionError("the weights stay as they are while ranks generate together")

    def close(self) -> None:
        raise AssertionError("the engine belongs to the caller")
