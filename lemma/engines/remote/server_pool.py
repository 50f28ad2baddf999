"""The servers of an engine: which are up, their load, and which are coming back."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lemma.engines.remote.server_client import ServerClient, ServerReply
from lemma.engines.remote.server_process import ServerProcess

RETRY_SECONDS = 5.0  # between attempts to reach a lost server
SILENT_SECONDS = 60.0  # without a reply from a server that has work, before its health is checked
HUNG_SECONDS = 30.0  # for such a server to answer the health check


@dataclass(slots=True, eq=False)
class Member:
    """One server. It is up (`client`), starting (`coming`, if Lemma starts it), lost (`away`), or given up.

    `tokens` is the maximum number of tokens of its unfinished requests. `deaths` are those since the last completion.
    """

    number: int
    client: ServerClient | None = None
    coming: ServerProcess | None = None
    away: ServerClient | None = None
    tokens: int = 0
    deaths: int = 0
    heard: float = 0.0
    lost_at: float = 0.0
    ask_after: float = 0.0  # when one that is away is asked again
    published: int = 0  # the number of weight updates when it last loaded weights
    port: int | None = None  # of a server that Lemma starts

    @property
    def has_hope(self) -> bool:
        return self.client is not None or self.coming is not None or self.away is not None


@dataclass(slots=True)
class ServerPool:
    """Balances requests by outstanding tokens. All replies go into one queue."""

    members: list[Member] = field(default_factory=list)
    replies: queue.Queue[ServerReply] = field(default_factory=queue.Queue)
    _given: dict[str, tuple[Member, int]] = field(default_factory=dict)

    @property
    def up(self) -> list[Member]:
        return [member for member in self.members if member.client is not None]

    def give(self, name: str, tokens: int, chosen: Member | None = None) -> ServerClient | None:
        """Assign a job to this server, or the least loaded one; None if none is up."""
        chosen = chosen or min(self.up, key=lambda member: (member.tokens, member.number), default=None)
        if chosen is None:
            return None
        if chosen.tokens == 0:
            chosen.heard = time.monotonic()
        chosen.tokens += tokens
        self._given[name] = (chosen, tokens)
        return chosen.client

    def holder(self, name: str) -> Member | None:
        return self._given[name][0] if name in self._given else None

    def release(self, name: str) -> None:
        """A job is no longer at its server."""
        if name in self._given:
            member, tokens = self._given.pop(name)
            member.tokens -= tokens

    def lose(self, member: Member) -> list[str]:
        """A server is no longer up; returns the names of its jobs, in the order it got them."""
        names = [name for name, (holder, _) in self._given.items() if holder is member]
        for name in names:
            self.release(name)
        member.client = None
        member.lost_at = time.monotonic()
        return names

    def hung(self) -> list[Member]:
        """Servers that have work, have been silent for long, and fail the health check."""
        members = []
        for member in self.up:
            assert member.client is not None
            if member.tokens and time.monotonic() - member.heard > SILENT_SECONDS:
                if not member.client.is_well(HUNG_SECONDS):
                    members.append(member)
                member.heard = time.monotonic()
        return members

    def close(self) -> None:
        for member in self.members:
            for client in (member.client, member.coming, member.away):
                if client is not None:
                    client.close()
        self.members.clear()
        self._given.clear()

    def each(self, work: Callable[[ServerClient], object]) -> list[tuple[Member, ConnectionError]]:
        """Run `work` on every server that is up, in parallel; returns those that could not be reached."""
        from concurrent.futures import ThreadPoolExecutor

        members = self.up
        with ThreadPoolExecutor(max(1, len(members))) as threads:
            tasks = [(member, threads.submit(work, member.client)) for member in members if member.client]
        lost = [(member, task.exception()) for member, task in tasks]
        for _, error in lost:
            if error is not None and not isinstance(error, ConnectionError):
                raise error
        return [(member, error) for member, error in lost if isinstance(error, ConnectionError)]
