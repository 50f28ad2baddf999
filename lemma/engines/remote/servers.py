"""The generation servers of an engine: started or found, watched, given new weights, and replaced when they die.

Ranks share the servers: the first rank starts, updates and restarts them, and all send requests. What a kind of server
is told, and how, is in its subclass.
"""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from lemma.core import ranks
from lemma.core.errors import warn
from lemma.engines.protocol import EngineError
from lemma.engines.remote.server_client import ServerClient
from lemma.engines.remote.server_guard import KEY_VARIABLE, given_key
from lemma.engines.remote.server_options import ServerOptions
from lemma.engines.remote.server_pool import RETRY_SECONDS, Member, ServerPool
from lemma.engines.remote.server_process import ServerProcess
from lemma.engines.remote.weights_probe import ProbeScores, compare, verify
from lemma.models.policy import Policy

WAIT_SECONDS = 0.2
# A server that took long to say nothing is asked again after so many times that time.
PATIENCE = 10

Counts = dict[str, int | None]


class Servers(ABC):
    """`ask_again` gets the names of jobs whose server is lost, after it has left the pool."""

    noun: ClassVar[str]
    """What one is called in messages."""
    by_hand: ClassVar[str]
    """The command that starts one."""

    def __init__(
        self, policy: Policy, options: ServerOptions, folder: Path, ask_again: Callable[[Sequence[str]], None]
    ):
        self.policy, self.options, self.folder, self._ask_again = policy, options, folder, ask_again
        self.pool = ServerPool()
        self.key = given_key() or secrets.token_hex(16)
        self.scored: ProbeScores | None = None  # by the first server, after the last weights
        self._published = 0
        self._warned: set[int] = set()

    # --- what a kind of server is told ---------------------------------------------------------------------------

    @abstractmethod
    def command(self, number: int, port: int) -> tuple[list[str], Mapping[str, str]]:
        """The command line of a server of this machine, and its environment."""

    @abstractmethod
    def prepare(self, client: ServerClient, *, is_own: bool) -> None:
        """For a server that has just been started, or found: all that it needs before it is asked anything. One that
        was started from here (`is_own`) need not be given the weights it has read from the folder."""

    @abstractmethod
    def load(self, client: ServerClient) -> Counts:
        """The server takes the latest weights. Returns how many tokens each of its running jobs has from the old ones,
        and None for those that were finished, as far as the client has to know."""

    @abstractmethod
    def score(self, client: ServerClient) -> ProbeScores:
        """The probe, scored by the server."""

    # --- starting and finding ------------------------------------------------------------------------------------

    @property
    def first(self) -> ServerClient | None:
        """The first server that is up."""
        return self.pool.up[0].client if self.pool.up else None

    def start(self) -> None:
        if isinstance(self.options.servers, list):
            self._find(self.options.servers)
        else:
            self._launch_all(self.options.servers)

    def _find(self, urls: Sequence[str]) -> None:
        """Connect to running servers. One of them is enough: the others are taken in when they come."""
        clients = [ServerClient(url, self.key, self.pool.replies) for url in urls]
        self.pool.members += [Member(number, client) for number, client in enumerate(clients)]
        end = time.monotonic() + self.options.start_seconds
        while True:
            wrong = {client.url: client.refusal() for client in clients}
            for url, problem in wrong.items():
                is_hopeless = problem is not None and problem.startswith("it ")
                if is_hopeless or (all(wrong.values()) and time.monotonic() > end):
                    raise EngineError(
                        f"the {self.noun} {url} does not serve: {problem}",
                        fix=f"start it with `{self.by_hand}` and the {KEY_VARIABLE} of here",
                    )
            if not all(wrong.values()):
                break
            time.sleep(RETRY_SECONDS / 10)
        missing = ranks.from_leader(lambda: [url for url, problem in wrong.items() if problem], f"the {self.noun}s")
        for member, client in zip(self.pool.members, clients, strict=True):
            if client.url in missing:
                member.client, member.away, member.lost_at = None, client, time.monotonic()
                warn(f"the {self.noun} {client.url} does not serve yet; the others begin without it")
        ranks.from_leader(lambda: self._prepare(is_own=False), f"publishing weights to the {self.noun}s")

    def _launch_all(self, count: int) -> None:
        """The first rank starts the servers and tells the others their addresses."""
        if ranks.world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size())):
            raise EngineError(
                f"{self.noun}s that Lemma starts serve the ranks of one machine",
                fix=f"start them with `{self.by_hand}` and give their addresses as `servers`",
            )

        def start() -> list[tuple[str, str]]:
            self.pool.members += [Member(number) for number in range(count)]
            started = [self._launch(member) for member in self.pool.members]
            for member, server in zip(self.pool.members, started, strict=True):
                server.wait_until_ready()
                member.client, member.coming = server, None
            self._prepare(is_own=True)
            return [(server.url, server.key) for server in started]

        addresses = ranks.from_leader(start, f"starting the {self.noun}s")
        if not ranks.is_leader():
            clients = [ServerClient(url, key, self.pool.replies) for url, key in addresses]
            self.pool.members += [Member(number, client) for number, client in enumerate(clients)]

    def _prepare(self, *, is_own: bool) -> None:
        self._published += 1
        for member, _ in self.pool.each(lambda client: self.prepare(client, is_own=is_own)):
            self.lose(member)

    def _launch(self, member: Member) -> ServerProcess:
        member.published, log = self._published, self.folder / f"server-{member.number}.log"
        member.coming = ServerProcess(
            lambda port: self.command(member.number, port), log, self.options.start_seconds, self.noun,
            self.pool.replies, self.key, member.port,
        )  # fmt: skip
        member.port = member.coming.port
        return member.coming

    def close(self) -> None:
        self.pool.close()

    # --- weights -------------------------------------------------------------------------------------------------

    def publish(self) -> Counts:
        """All servers that are up take the latest weights; those that are starting take them when they are up."""
        self._published += 1
        counts: Counts = {}
        for member, _ in self.pool.each(lambda client: counts.update(self.load(client))):
            self.lose(member)
        return counts

    def check(self, version: int) -> float:
        """Every server scores the probe, and every rank compares all of them with its policy: the largest
        difference."""
        scores = ranks.from_leader(self._score_all, f"the probe of the {self.noun}s")
        difference = max(verify(self.policy, scored, version, f"a {self.noun}") for scored in scores)
        self.scored = scores[0]
        return difference

    def _score_all(self) -> list[ProbeScores]:
        end = time.monotonic() + self.options.start_seconds
        while True:
            scores, words = [], ""
            for member in self.pool.up:
                assert member.client is not None
                try:
                    scores.append(self.score(member.client))
                except ConnectionError:
                    words = member.client.last_words()
                    self.lose(member)
            if scores:
                return scores
            if time.monotonic() > end:
                raise EngineError(f"the {self.noun} died while it was checked: {words}")
            time.sleep(WAIT_SECONDS)
            self.look_after()

    def _compare(self, client: ServerClient) -> None:
        """Compare with the servers' last scores, since the policy may have changed after them."""
        if self.scored is not None:
            compare(self.policy, self.scored, self.score(client))

    # --- watching ------------------------------------------------------------------------------------------------

    def lose(self, member: Member) -> None:
        """Restart a server if Lemma started it, otherwise wait for it to return; the others take its requests."""
        client = member.client
        assert client is not None
        words = client.last_words()
        names = self.pool.lose(member)
        if isinstance(client, ServerProcess):
            client.close()
            self._start_again(member, words)
        else:
            member.away = client
        self._ask_again(names)

    def _start_again(self, member: Member, words: str) -> None:
        member.deaths += 1
        if member.deaths <= self.options.restarts:
            self._launch(member)
            return
        member.coming = None
        said = f"the {self.noun} died {member.deaths} times in a row; its last words: {words}"
        if not any(other.has_hope for other in self.pool.members):
            raise EngineError(said)
        warn(f"{said}; the others go on without it")

    def look_after(self) -> None:
        """Find servers that died or hang, and take back those that work again, or come for the first time."""
        for member in self.pool.up:
            if member.client is not None and not member.client.is_alive():
                self.lose(member)
        for member in self.pool.hung():
            self.lose(member)
        for member in self.pool.members:
            if member.coming is not None:
                self._look_at_coming(member, member.coming)
            elif member.away is not None and self._is_back(member):
                member.client, member.away = member.away, None
        if not any(member.has_hope for member in self.pool.members):
            urls = ", ".join(self.options.servers) if isinstance(self.options.servers, list) else "started by Lemma"
            raise EngineError(f"no {self.noun} is left ({urls})", fix="start them again, then run the same command")

    def _look_at_coming(self, member: Member, server: ServerProcess) -> None:
        try:
            if not server.is_ready():
                return
            self.prepare(server, is_own=True)
            if member.published != self._published:
                self.load(server)
            self._compare(server)
            member.client, member.coming = server, None
        except (EngineError, ConnectionError) as error:
            words = server.last_words()
            server.close()
            if "other weights" in str(error):
                raise
            self._start_again(member, words)

    def _is_back(self, member: Member) -> bool:
        """Whether a server on another machine answers, again or for the first time; it gets the weights, as it may have
        lost them. Where no other is up, it is waited for no longer than for one that starts."""
        assert member.away is not None
        now = time.monotonic()
        if not self.pool.up and now - member.lost_at > self.options.start_seconds:
            member.away.close()
            member.away = None
            return False
        if now < member.ask_after:
            return False
        try:
            if member.away.refusal(RETRY_SECONDS) is not None:
                return False
            if ranks.is_leader():
                self.prepare(member.away, is_own=False)
            self._compare(member.away)
            return True
        except ConnectionError:
            return False
        except EngineError as error:
            if (ranks.is_leader() or "other weights" not in str(error)) and member.number not in self._warned:
                self._warned.add(member.number)
                warn(f"the {self.noun} {member.away.url} is not used: {error}")
            return False
        finally:
            member.ask_after = time.monotonic() + max(RETRY_SECONDS, PATIENCE * (time.monotonic() - now))
