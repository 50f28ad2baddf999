"""Where episodes in an environment sit: who is admitted, who waits for a reply, who speaks next.

With an exact schedule nothing here depends on time: a turn is over when all its replies are in, and then everybody
speaks in the order of their keys. With a free one everybody speaks as soon as there is a reply.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lemma.engines.protocol import Completion, Engine, Key, Sampling
from lemma.rollouts.player import Player, World

if TYPE_CHECKING:
    from lemma.rollouts.play import Ask


class Table:
    """`over` hears of each player whose episode is over; with an exact schedule in an order that is always the same.

    With `most` players at once, asks begin as others end, and everybody speaks as soon as there is a reply.
    """

    def __init__(
        self,
        engine: Engine,
        world: World | None,
        sampling: Callable[[Ask], Sampling],
        over: Callable[[Player], None],
        most: int | None = None,
    ):
        self._engine, self._world, self._sampling, self._over = engine, world, sampling, over
        self._asks: deque[Ask] = deque()
        self._most = most
        # Whether asks may begin.
        self.is_open = True
        self._is_exact = most is None and (world is None or world.is_exact)
        self._line: dict[int, Player] = {}
        self._by_world: dict[int, Player] = {}
        self._going_on: list[Player] = []
        self._speaking: dict[Key, Player] = {}
        # Of asks that have begun, how many attempts have not spoken yet; tokens and number of those who play.
        self._beginning: dict[Key, int] = {}
        self._taken = self._players = 0

    # --- who is admitted -----------------------------------------------------------------------------------------

    def add(self, ask: Ask, *, is_urgent: bool = False) -> None:
        """One more ask, at the end or, if urgent, at the beginning of the queue."""
        if is_urgent:
            self._asks.appendleft(ask)
        else:
            self._asks.append(ask)

    def admit(self) -> None:
        """Submit the oldest asks: all of them without a world or limit, otherwise as many as there is room for."""
        while self.is_open and self._asks and self._has_room(self._asks[0]):
            ask = self._asks.popleft()
            self._taken += self._tokens(ask) * ask.n
            self._players += ask.n
            self._beginning[ask.request_key] = ask.n
            self._engine.submit(ask.request(self._sampling(ask)))

    def _has_room(self, ask: Ask) -> bool:
        if not self._players:
            return True
        if self._most is not None and self._players + ask.n > self._most:
            return False
        if self._world is None:
            return True
        most = self._world.options.episodes
        if most is not None:
            return self._players + ask.n <= most
        room = self._engine.room
        return self._taken + self._tokens(ask) * ask.n <= (math.inf if room is None else room)

    def _tokens(self, ask: Ask) -> int:
        """Tokens that an episode may have in the end."""
        if self._world is None:
            return 0
        most = self._world.options.room(self._sampling(ask).max_tokens)
        return min(len(ask.prompt) + len(ask.prefix) + most, self._world.longest)

    def leave(self, ask: Ask) -> None:
        """An attempt at this ask is over."""
        if self._world is not None:
            self._taken -= self._tokens(ask)
        self._players -= 1

    # --- who waits -----------------------------------------------------------------------------------------------

    def speaker(self, completion: Completion) -> Player | None:
        """Whose turn this is; None for a first one."""
        player = self._speaking.pop(completion.key, None)
        if player is None:
            self._beginning[completion.key] -= 1
            if not self._beginning[completion.key]:
                del self._beginning[completion.key]
        return player

    def sit(self, player: Player) -> None:
        """A player has spoken."""
        if player.held is not None:
            self._by_world[id(player.held)] = player
        self._line[id(player)] = player
        self.look()

    def look(self, wait: float = 0.0) -> None:
        """Take the replies that are there, after at most `wait` seconds."""
        if self._world is not None:
            # Who hears of its world begins the next call, which may be over at once.
            while answered := self._world.worlds.answers(wait):
                for held in answered:
                    self._heard(self._by_world[id(held)])
                wait = 0.0
        while self._line and not (player := next(iter(self._line.values()))).is_waiting:
            self._rise(player)

    def _heard(self, player: Player) -> None:
        player.hear()
        if not (self._is_exact or player.is_waiting):
            self._rise(player)

    def _rise(self, player: Player) -> None:
        del self._line[id(player)]
        if player.state == "over":
            if player.held is not None:
                self._by_world.pop(id(player.held), None)
            self._over(player)
            if not self._is_exact:
                self.admit()
        elif self._is_exact:
            self._going_on.append(player)
        else:
            self._submit(player)

    def _submit(self, player: Player) -> None:
        request = player.request()
        self._speaking[request.key] = player
        self._engine.submit(request)

    @property
    def is_waiting(self) -> bool:
        """Whether anybody waits for a reply."""
        return bool(self._line)

    @property
    def is_speaking(self) -> bool:
        """Whether the engine has something to do."""
        return bool(self._speaking or self._beginning)

    @property
    def unfinished(self) -> list[Key]:
        """Requests of which the engine owes something."""
        return [*self._speaking, *self._beginning]

    @property
    def may_speak(self) -> bool:
        """Whether the engine may begin: with an exact schedule not before all replies are in."""
        return self.is_speaking and not self._is_exact

    def next_turn(self) -> bool:
        """Everybody who goes on speaks, in the order of their keys, and new ones are admitted; whether anybody does."""
        for player in sorted(self._going_on, key=lambda one: one.episode.order):
            self._submit(player)
        self._going_on = []
        self.admit()
        return self.is_speaking

    def clear(self) -> None:
        """Leave every world that is still open."""
        for player in self._by_world.values():
            player.close()
        self._by_world.clear()
