"""Runs episodes on one engine: each is a coroutine that awaits its completions, its environment and its score. `play`
is for training, evaluation and `debug`: graded episodes of some problems.

Everything happens in the thread that iterates over `run`, on an event loop of the runner's own: the engine works for a
few tokens, then every episode goes on that can. With an exact schedule nothing depends on time: requests wait until all
episodes that are under way wait, and are then submitted in the order of their keys. With a free one they are submitted
at once.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from lemma.core.faults import fault_point
from lemma.core.types import Outcome, Problem
from lemma.engines.protocol import Completion, Engine, Key, Request, Sampling
from lemma.rollouts.episode import Episode
from lemma.rollouts.journal import Journal
from lemma.rollouts.multi_turn import World, play_turns
from lemma.rollouts.sample_request import SampleRequest
from lemma.rollouts.scorer import Scorer, ScoringQueue

# Seconds between two looks at deadlines and verdicts, while nothing happens.
LOOK_SECONDS = 0.5


def play(
    engine: Engine,
    asks: Sequence[SampleRequest],
    sampling: Sampling | Callable[[SampleRequest], Sampling],
    scorer: Scorer,
    *,
    world: World | None = None,
    journal: Journal | None = None,
    patience: float | None = None,
) -> Iterator[Episode]:
    """Graded episodes, roughly in the order in which they finish; sort them before anything depends on the order.

    What the journal holds already is handed back first and not played again: of an ask that is there in part, all
    attempts are made and those that are there are passed over. Without a `world` the first answer is the last; in one,
    replies are made while others generate.

    Episodes are scored in batches that depend on the order alone, never on time, since the last bit of a reward model's
    score may depend on its batch. With `patience` in seconds, what is graded does not wait for a batch any longer than
    that, nor when the engine fails: for rewards that look at one completion at a time.
    """
    sampling_of = sampling if callable(sampling) else lambda ask: sampling
    if world is not None and not world.options.is_stepped:
        from lemma.rollouts.gateway_play import play_agents

        yield from play_agents(engine, asks, sampling_of, scorer, world=world, journal=journal)
        return
    known = journal.episodes if journal is not None else {}
    runner = EpisodeRunner(engine, sampling_of, scorer, world, patience=patience)
    with closing(runner.loop):
        for ask in asks:
            there = ask.known(known) if known else []
            yield from there
            if len(there) < ask.n:
                runner.add(ask, journal)
        yield from runner.run()
        fault_point("rollouts.generated")
        yield from runner.scoring.settle_all()


class EpisodeRunner:
    """With `most`, so many episodes run at once, and further asks begin as others end; without, all that the cache and
    the environment's options have room for. `patience`: see `ScoringQueue.due`."""

    def __init__(
        self,
        engine: Engine,
        sampling: Callable[[SampleRequest], Sampling],
        scorer: Scorer,
        world: World | None,
        *,
        most: int | None = None,
        patience: float | None = None,
    ):
        self._engine, self._scorer, self._world, self._sampling = engine, scorer, world, sampling
        self._most, self._patience = most, patience
        self._is_exact = most is None and (world is None or world.is_exact)
        self._has_no_limit = most is None and world is None
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._raised)
        self._woken = asyncio.Event()
        self._failure: BaseException | None = None
        self._asks: deque[tuple[SampleRequest, Journal | None]] = deque()
        # Attempts that are not over yet, by the request of their ask.
        self._owed: dict[Key, int] = {}
        # Who waits for the samples of a request that was submitted; and requests that wait for the others.
        self._futures: dict[Key, dict[int, asyncio.Future[Completion]]] = {}
        self._held_back: list[tuple[tuple[str, int], Request, asyncio.Future[Completion]]] = []
        # Episodes under way, and the tokens that they may have in the end.
        self._running = self._tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()
        # Episodes of this moment that are over, before they are read together.
        self._over: list[tuple[Problem, Episode, Outcome | None, Journal | None]] = []
        self.is_open = True
        """Whether asks may begin."""
        self.scoring = ScoringQueue(scorer)

    def add(self, ask: SampleRequest, journal: Journal | None, *, is_urgent: bool = False) -> None:
        """Begin its episodes when there is room, before all others if urgent, and write them to the journal; those that
        are there are left out."""
        self._owed[ask.request_key] = ask.n
        if is_urgent:
            self._asks.appendleft((ask, journal))
        else:
            self._asks.append((ask, journal))

    def owes(self, requests: Iterable[Key]) -> bool:
        """Whether any attempt of these is not over."""
        return any(self._owed.get(key) for key in requests)

    def forget(self, requests: Iterable[Key]) -> None:
        for key in requests:
            del self._owed[key]

    @property
    def is_running(self) -> bool:
        return self._running > 0

    def run(self, is_unfinished: Callable[[], bool] | None = None) -> Iterator[Episode]:
        """Run until everything is over, or as long as `is_unfinished` says; yields what was scored meanwhile. Where
        this ends with an exception, nothing stays behind: no request in the engine, and no open environment."""
        unfinished = is_unfinished or (lambda: bool(self._asks or self._running))
        pool = None if self._world is None else self._world.pool
        if pool is not None:
            pool.notify(self.loop, self._woken.set)
        try:
            while unfinished():
                yield from self.loop.run_until_complete(self._run_until_scored(unfinished))
        except BaseException as error:
            if isinstance(error, Exception) and self._patience is not None:
                self.scoring.settle(self.scoring.graded())
            self._give_up()
            raise
        finally:
            if pool is not None:
                pool.notify(self.loop, None)

    # --- one turn of the loop ------------------------------------------------------------------------------------

    async def _run_until_scored(self, unfinished: Callable[[], bool]) -> list[Episode]:
        """Run until some episodes are scored, or nothing is unfinished."""
        while unfinished():
            self._begin_what_may()
            await asyncio.sleep(0)
            if self._engine.is_busy or self._engine.finished:
                self._generate()
                await asyncio.sleep(0)
            else:
                await self._news()
            if self._world is not None:
                self._world.pool.poll()
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._over:  # what was said last is decoded together, then graded
                over, self._over = self._over, []
                self._scorer.read([episode for _, episode, _, _ in over])
                waits = self._is_exact and self._world is not None
                for problem, episode, outcome, journal in over:
                    self.scoring.add(self._scorer.begin(problem, episode, outcome), journal, waits=waits)
            if scored := self.scoring.settle(self.scoring.due(self._patience)):
                return scored
        return []

    async def _news(self) -> None:
        """Wait until an episode goes on, or for a look at deadlines."""
        if self._running and not self._woken.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), LOOK_SECONDS)
        self._woken.clear()
        await asyncio.sleep(0)

    def _generate(self) -> None:
        """Let the engine work, and give each sample that has finished to its episode."""
        engine = self._engine
        if engine.is_busy and not engine.finished:
            engine.work()
        while engine.finished:
            completion = engine.finished.popleft()
            waiting = self._futures.get(completion.key, {})
            future = waiting.pop(completion.sample, None)
            if not waiting:
                self._futures.pop(completion.key, None)
            if future is not None and not future.done():
                future.set_result(completion)

    def _begin_what_may(self) -> None:
        """Submit the requests that wait for the others, if nobody is left to wait for, and begin further asks."""
        if len(self._held_back) == self._running or not self._is_exact:
            held_back, self._held_back = sorted(self._held_back, key=lambda one: one[0]), []
            for _, request, future in held_back:
                self._submit(request, {0: future})
            if self._world is not None:
                self.scoring.let_in()
            while self.is_open and self._asks and (self._has_no_limit or self._has_room(self._asks[0][0])):
                self._begin(*self._asks.popleft())

    # --- episodes ------------------------------------------------------------------------------------------------

    def _begin(self, ask: SampleRequest, journal: Journal | None) -> None:
        """Submit the first turn of all attempts as one request; each goes on by itself as its sample finishes."""
        futures: dict[int, asyncio.Future[Completion]] = {n: self.loop.create_future() for n in range(ask.n)}
        self._submit(ask.request(self._sampling(ask)), futures)
        self._running += ask.n
        if self._world is not None:
            self._tokens += ask.n * self._world.most_tokens(ask, self._sampling(ask))
        for number, future in futures.items():
            task = self.loop.create_task(self._episode(ask, number, future, journal))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _episode(
        self, ask: SampleRequest, number: int, completion: asyncio.Future[Completion], journal: Journal | None
    ) -> None:
        """One attempt, from its first turn to its end; it is scored afterwards."""
        outcome: Outcome | None = None
        try:
            if journal is not None and journal.episodes and (repr(ask.key), ask.first + number) in journal.episodes:
                await completion
                return
            if self._world is None:
                episode = ask.episode(await completion)
                fault_point("rollouts.sampled")
            else:
                generate = self._generate_after((repr(ask.key), ask.first + number))
                sampling = self._sampling(ask)
                episode, outcome = await play_turns(ask, completion, sampling, self._world, generate, self._scorer)
            self._over.append((ask.problem, episode, outcome, journal))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 (`run` raises it)
            self._fail(error)
        finally:
            self._running -= 1
            if self._world is not None:
                self._tokens -= self._world.most_tokens(ask, self._sampling(ask))
            self._owed[ask.request_key] -= 1
            self._woken.set()

    def _generate_after(self, order: tuple[str, int]) -> Callable[[Request], asyncio.Future[Completion]]:
        """`generate` for the later turns of an episode: takes a request of one sample, gives what is awaited."""

        def generate(request: Request) -> asyncio.Future[Completion]:
            future: asyncio.Future[Completion] = self.loop.create_future()
            if self._is_exact:
                self._held_back.append((order, request, future))
            else:
                self._submit(request, {0: future})
            self._woken.set()
            return future

        return generate

    def _submit(self, request: Request, futures: dict[int, asyncio.Future[Completion]]) -> None:
        self._futures[request.key] = futures
        try:
            self._engine.submit(request)
        except BaseException:
            del self._futures[request.key]
            raise

    def _raised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of the loop raised, as it does where a signal reaches it."""
        if "handle" in context:
            self._fail(context.get("exception"))

    def _fail(self, error: BaseException | None) -> None:
        """Something raised on the loop: `run` raises it."""
        self._failure = self._failure or error
        self._woken.set()

    # --- room ----------------------------------------------------------------------------------------------------

    def _has_room(self, ask: SampleRequest) -> bool:
        if not self._running:
            return True
        if self._most is not None and self._running + ask.n > self._most:
            return False
        if self._world is None:
            return True
        most = self._world.options.episodes
        if most is not None:
            return self._running + ask.n <= most
        room = self._engine.capacity
        wanted = ask.n * self._world.most_tokens(ask, self._sampling(ask))
        return self._tokens + wanted <= (math.inf if room is None else room)

    def _give_up(self) -> None:
        """Leave nothing behind in the engine, and leave every environment."""
        self._over.clear()
        self._held_back.clear()
        tasks: Sequence[asyncio.Task[Any]] = list(asyncio.all_tasks(self.loop))
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        futures, self._futures = self._futures, {}
        self._engine.drop(list(futures))
