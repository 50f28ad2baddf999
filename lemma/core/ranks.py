"""The processes (ranks) that share a run, and what they tell each other. One process is a world of its own.

Every rank runs the whole program on the whole step's data. Only work that takes long is dealt out, by *slots*: a fixed
number of parts, recorded when a run begins, which the ranks share among themselves. What is computed depends on slots
and never on ranks. Every wait goes through `RankWorld.waiting`, which knows a deadline and who is missing.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class RankWorld:
    """This rank among the others. `control` carries objects between hosts' memories, `carrier` carries tensors."""

    rank: int = 0
    size: int = 1
    slots: int = 1
    control: Any = None
    carrier: Any = None
    # Another control, for a thread that works beside the main one: what both say is never mixed up.
    aside: Any = None
    # Whether the carrier takes tensors where they are; otherwise they go through the host's memory.
    on_device: bool = False
    waiting: Callable[[str], AbstractContextManager[Any]] = field(default=lambda place: nullcontext())
    note: Callable[[str], None] = field(default=lambda place: None)
    # What objects from other ranks must be marked with before they are read.
    key: bytes = field(default=b"", repr=False)


class _ThisThread(threading.local):
    """What this thread is at."""

    waits = 0
    # Whether it does this rank's own part of something, and others learn of what it raises.
    may_leave = False
    is_aside = False


_world = RankWorld()
_thread = _ThisThread()


@contextmanager
def joined(world: RankWorld) -> Iterator[RankWorld]:
    """Within `with`, this process is a rank of that world."""
    global _world
    before, _world = _world, world
    try:
        yield world
    finally:
        _world = before


def rank() -> int:
    return _world.rank


def world_size() -> int:
    return _world.size


def is_leader() -> bool:
    """Whether this is the rank that speaks and writes for all."""
    return _world.rank == 0


def slots() -> int:
    return _world.slots


def use_slots(count: int) -> None:
    _world.slots = count


def slots_for(ranks: int, servers: int) -> int:
    """As many slots as ranks; with more generation servers than those, the next multiple that gives each of them
    something."""
    return ranks * max(1, -(-servers // ranks))


def slots_of_one() -> int:
    """The most slots that a rank has."""
    return -(-_world.slots // _world.size)


def own_slots() -> range:
    return range(_world.rank * _world.slots // _world.size, (_world.rank + 1) * _world.slots // _world.size)


def slots_of(rank: int) -> range:
    """The slots of a rank: neighbours, so that their sums are added up before anything is sent."""
    return range(rank * _world.slots // _world.size, (rank + 1) * _world.slots // _world.size)


def carrier() -> Any:
    """The process group that carries tensors."""
    return _world.carrier


def carries_on_device() -> bool:
    """Whether the carrier takes tensors where they are; otherwise they go through the host's memory."""
    return _world.on_device


def note_place(place: str) -> None:
    """Remember what this rank does now, for those who wait for it."""
    _world.note(place)


# --- waiting for each other ----------------------------------------------------------------------------------------


@contextmanager
def waiting_for_ranks(place: str) -> Iterator[None]:
    """Within `with`, this rank waits for all others that learn."""
    _thread.waits += 1
    try:
        with _world.waiting(place):
            yield
    finally:
        _thread.waits -= 1


def may_go_aside() -> bool:
    """Whether a thread of each rank can agree with those of the others while the main ones do other things."""
    return _world.size == 1 or _world.aside is not None


@contextmanager
def aside() -> Iterator[None]:
    """Within `with`, this thread agrees with those that do the same on the other ranks."""
    assert may_go_aside(), "there is no way aside"
    _thread.is_aside = True
    try:
        yield
    finally:
        _thread.is_aside = False


def _control() -> Any:
    return _world.aside if _thread.is_aside else _world.control


def may_leave() -> bool:
    """Whether an exception that comes from outside, such as a signal's, leaves nobody behind who waits."""
    return _world.size == 1 or (_thread.may_leave and not _thread.waits)


def gather_over_ranks(value: T, place: str = "an agreement") -> list[T]:
    """What every rank gives, in the order of ranks. Every rank must call this alike."""
    if _world.size == 1:
        return [value]
    from lemma.core.rank_objects import exchange_objects

    return exchange_objects(_world, _control(), value, place, to_leader=False)


def gather_to_leader(value: T, place: str = "an agreement") -> list[T]:
    """What every rank gives, in the order of ranks, on the first rank; nothing on the others."""
    if _world.size == 1:
        return [value]
    from lemma.core.rank_objects import exchange_objects

    return exchange_objects(_world, _control(), value, place, to_leader=True)


def together(work: Callable[[], T], place: str = "an agreement") -> list[T]:
    """Do each rank's own part, then gather. What one rank raises, all raise: nobody waits for somebody who left."""
    if _world.size == 1:
        return [work()]
    mine: T | None = None
    trouble: BaseException | None = None
    try:
        _thread.may_leave = True
        mine = work()
        _thread.may_leave = False
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 (raised again below, here and by all others)
        _thread.may_leave = False
        trouble = error
    from lemma.core.rank_objects import portable

    everybody = gather_over_ranks((mine, None if trouble is None else portable(trouble, _world.rank)), place)
    if trouble is not None:
        raise trouble
    for _, sent in everybody:
        if sent is not None:
            raise pickle.loads(sent)
    return [value for value, _ in everybody]  # type: ignore[misc]


def from_leader(work: Callable[[], T], place: str = "what the first rank does") -> T:
    """Have the first rank do this while the others wait; all get what it found, or raise what it raised."""
    return together(lambda: work() if is_leader() else None, place)[0]  # type: ignore[return-value]


@contextmanager
def leader_first(place: str) -> Iterator[None]:
    """Within `with`, the first rank goes ahead, and the others follow when it is done: they find what it has made."""
    if not is_leader():
        gather_over_ranks(None, place)
    try:
        yield
    finally:
        if is_leader():
            gather_over_ranks(None, place)
