"""The jobs of an engine at its servers: what is under way where, and what waits for a server."""

from __future__ import annotations

import queue
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from lemma.engines.protocol import EngineError
from lemma.engines.remote.server_client import ServerReply
from lemma.engines.remote.server_pool import Member, ServerPool
from lemma.engines.remote.servers import WAIT_SECONDS, Servers


class ServedJobs:
    """A part of an engine. A job has a `name` of its own; jobs of a server that is lost are asked again."""

    servers: Servers
    _jobs: dict[str, Any]
    _waiting: dict[str, Any]

    @property
    def pool(self) -> ServerPool:
        return self.servers.pool

    @abstractmethod
    def _ask(self, job: Any) -> None:
        """Send it to a server, or keep it among those that wait if none is up."""

    def _ask_again(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._jobs:
                self._ask(self._jobs[name])

    def _abort(self, job: Any) -> None:
        self._waiting.pop(job.name, None)
        holder = self.pool.holder(job.name)
        self.pool.release(job.name)
        if holder is not None and holder.client is not None:
            holder.client.drop(job.name)

    def _replies(self) -> Iterator[tuple[Any, Member, ServerReply]]:
        """Wait briefly for a reply; then all that have come from servers that still have the job."""
        if not self.pool.members:
            raise EngineError(f"the {self.servers.noun} is closed", fix="make another engine")
        replies = []
        with suppress(queue.Empty):
            replies.append(self.pool.replies.get(timeout=WAIT_SECONDS))
            while True:
                replies.append(self.pool.replies.get_nowait())
        for reply in replies:
            job, member = self._jobs.get(reply.name), self.pool.holder(reply.name)
            if job is not None and member is not None and reply.source in (None, member.client):
                member.heard = time.monotonic()
                yield job, member, reply

    def _look_after(self) -> None:
        """Look after the servers; then send all waiting jobs, if one is up."""
        try:
            self.servers.look_after()
        except EngineError:
            self._jobs.clear()
            raise
        if self.pool.up:
            waiting, self._waiting = self._waiting, {}
            for job in waiting.values():
                self._ask(job)
