"""Dividing the ranks into those that learn, the first ones, and those that only speak, and connecting both.

Requests and completions travel over a socket between each two of them, weights over a group of the first rank that
learns and all that speak. Those who learn are a world of their own, which the others are no part of.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge, wait
from typing import Any

from lemma.cluster.arrival import address_in_use
from lemma.core.errors import UserError
from lemma.core.ranks import RankWorld, SpeakerLink, ask_to_stop, gather_over_ranks, joined, waiting_for_speakers
from lemma.engines.speaker_messages import Bye, StopAsked

LOCAL = "127.0.0.1"
# How long somebody who connects may take to say who it is.
GREET_SECONDS = 30


@contextmanager
def divided(world: RankWorld, speakers: int, deadline: float) -> Iterator[RankWorld]:
    """Within `with`, this rank is one of those that learn, or a speaker."""
    if not speakers:
        yield world
        return
    first = world.size - speakers
    if first < 1:
        raise UserError(
            f"cluster.speakers is {speakers}, and of {world.size} ranks none is left to learn",
            fix=f"start {speakers + 1} ranks or more, or take fewer speakers",
        )
    control, aside, carrier, weights = groups_of(first, world.size, world.on_device, deadline)
    connections = _connect(world, first)
    is_speaker = world.rank >= first
    others = range(first) if is_speaker else range(first, world.size)
    link = SpeakerLink(others, connections, weights, world.on_device, deadline)
    if is_speaker:
        mine = replace(world, size=1, slots=1, control=None, aside=None, carrier=None, link=link, is_speaker=True)
    else:
        mine = replace(world, size=first, control=control, aside=aside, carrier=carrier, link=link)
        link.look = lambda: _look(link)
    try:
        with joined(mine):
            yield mine
        for connection in () if is_speaker else connections:
            with suppress(OSError):  # who is missing at the end is said there
                connection.send(Bye())
    finally:
        for connection in connections:
            connection.close()


def _look(link: SpeakerLink) -> None:
    """While there is no engine: whether a speaker was asked to stop. What else it says came too late for anybody."""
    with waiting_for_speakers("words of the speakers"):
        for connection in wait(link.connections, 0.0):
            assert isinstance(connection, Connection)
            try:
                word = connection.recv()
            except (EOFError, OSError) as error:
                rank = link.ranks[link.connections.index(connection)]
                raise RuntimeError(f"the connection to rank {rank} is lost") from error
            if isinstance(word, StopAsked):
                ask_to_stop()


def groups_of(learners: int, size: int, on_device: bool, deadline: float) -> tuple[Any, Any, Any, Any]:
    """The groups of all that learn, two for objects and one for tensors, and that of the first of them with all that
    speak; None where this rank is no member. Every process calls this."""
    import torch.distributed as dist

    def group(ranks: Iterable[int], backend: str) -> Any:
        made = dist.new_group(list(ranks), timeout=timedelta(seconds=deadline), backend=backend)
        return None if made is dist.GroupMember.NON_GROUP_MEMBER else made

    backend = "nccl" if on_device else "gloo"
    control, aside = group(range(learners), "gloo"), group(range(learners), "gloo")
    carrier = group(range(learners), backend) if on_device else control
    return control, aside, carrier, group([0, *range(learners, size)], backend)


def _connect(world: RankWorld, first: int) -> list[Connection]:
    """Connections to all ranks of the other kind, in their order."""
    key = hmac.digest(world.key, b"speakers", "sha256")
    is_speaker = world.rank >= first
    listener = Listener((_own_host(), 0), backlog=first) if is_speaker else None
    addresses = gather_over_ranks(listener.address if listener else None, "where the speakers are")
    with world.waiting("a connection between learners and speakers"):
        try:
            if listener is None:
                connections = [_greet(address, key, world.rank) for address in addresses[first:]]
            else:
                connections = _accepted(listener, key, first)
        except (OSError, EOFError) as error:
            raise RuntimeError(f"it was refused: {error}") from error
        finally:
            if listener is not None:
                listener.close()
    for connection in connections:
        _without_delay(connection)
    return connections


def _accepted(listener: Listener, key: bytes, count: int) -> list[Connection]:
    """So many that know the key, in the order of their ranks. Whoever says nothing, or something else, is sent away."""
    known: dict[int, Connection] = {}
    while len(known) < count:
        connection = listener.accept()
        try:
            _limit_reading(connection, GREET_SECONDS)
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            known[connection.recv()] = connection
            _limit_reading(connection, 0)
        except (OSError, EOFError, AuthenticationError):
            connection.close()
    return [known[rank] for rank in sorted(known)]


def _limit_reading(connection: Connection, seconds: int) -> None:
    """Reading fails after so long; 0 is for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _greet(address: Any, key: bytes, rank: int) -> Connection:
    connection = Client(address, authkey=key)
    connection.send(rank)
    return connection


def _without_delay(connection: Connection) -> None:
    """Short words are sent at once and not collected."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _own_host() -> str:
    """Where the other ranks reach this one."""
    found = LOCAL if "LEMMA_MEETING" in os.environ else address_in_use()
    if ":" in found:
        raise UserError(
            f"speakers need IPv4, and this machine is reached at {found}", fix="give an IPv4 address as MASTER_ADDR"
        )
    return found
