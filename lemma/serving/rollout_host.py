"""The native engine of a generation server, in the thread that calls `run`: what clients ask for, and in which order.

A session has the engine for itself from its first batch until it ends, so that its samples are those of an engine that
does nothing else. Requests without a session are generated together, and new weights reach them between two bursts.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lemma.core.events import Sink
from lemma.core.faults import fault_point
from lemma.engines import make_engine
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Completion, EngineError, Request
from lemma.engines.remote.native_servers import layout_of
from lemma.engines.remote.weights_probe import policy_logprobs
from lemma.models.load_model import build_policy, pick_device
from lemma.models.model_options import ModelOptions
from lemma.models.policy import Policy
from lemma.serving.engine_driver import Call, CallEvent, EngineDriver
from lemma.serving.wire_errors import ApiError

# How often an idle engine looks for work that it was not woken for.
IDLE_SECONDS = 0.5
# For how long a session that asks for nothing keeps others waiting. It can go on later, from its first batch.
HOLD_SECONDS = 10.0
# Share of the memory that is free on a GPU once the weights are there.
CACHE_SHARE = 0.85


@dataclass(frozen=True)
class Sample:
    """A finished sample, with the seconds that the engine worked since the one before."""

    completion: Completion
    worked: float


Event = Sample | ApiError | dict[str, bool] | None
"""What a client gets: samples, an error, that its session or the weights it means are not here; None is the end."""


@dataclass(eq=False)
class Work:
    """Batches of a session from number `start` on, or one batch without a session, and who takes the results."""

    session: str | None
    start: int
    is_whole: bool
    batches: list[list[Request]]
    model: str
    version: int
    put: Callable[[Event], None]
    is_over: bool = False
    begun: int = 0
    owed: int = 0
    """Samples of the batch at work that have not come."""
    call: Call | None = None


@dataclass(eq=False)
class _Holder:
    """The session that has the engine, how many batches of it were begun, and when it last asked for anything."""

    session: str
    begun: int
    touched: float
    is_whole: bool


class RolloutHost:
    """`order` and `submit` are called from any thread. `model` takes the place of the path that a trainer names."""

    def __init__(self, sink: Sink, model: str | None = None):
        self._sink, self._model = sink, model
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._queue: deque[Work] = deque()
        self._running: set[Work] = set()
        self._holder: _Holder | None = None
        self._policy: Policy | None = None
        self._driver: EngineDriver | None = None
        self._id, self._version = "", -1
        self._said = time.perf_counter()

    def order(self, what: Callable[[], Any]) -> Future[Any]:
        """Have this done by the engine's thread, between two bursts of tokens."""
        future: Future[Any] = Future()
        self._orders.append((what, future))
        self._wake.set()
        return future

    def submit(self, work: Work) -> None:
        self.order(lambda: self._queue.append(work))

    def drop(self, work: Work) -> None:
        """Nobody waits for this any more."""
        self.order(lambda: self._drop(work))

    def run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._wake.clear()
            self._obey()
            self._admit()
            if self._driver is None or not self._driver.step():
                self._wake.wait(IDLE_SECONDS)

    def _obey(self) -> None:
        while self._orders:
            what, future = self._orders.popleft()
            try:
                future.set_result(what())
            except Exception as error:  # noqa: BLE001 (who gave the order is told, and the others are served on)
                future.set_exception(error)

    # --- orders ----------------------------------------------------------------------------------------------------

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Build a trainer's model and make an engine for it; the one before is forgotten."""
        self._unload()
        torch.set_num_threads(int(order["threads"]))
        if order["is_deterministic"]:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        start = None if order["start_from"] is None else Path(order["start_from"])
        model = ModelOptions.model_validate(order["model"])
        if self._model is not None and (start is None or not start.exists()):
            model, start = model.model_copy(update={"path": self._model}), None
        policy = build_policy(model, pick_device(order["device"]), int(order["model_seed"]), start)
        if layout_of(policy) != order["layout"]:
            raise EngineError(
                "a generation server has built a model with other weights than the trainer's",
                fix="give it the same model, and let it see the same files",
            )
        policy.module.eval()
        options = NativeOptions.model_validate(order["engine"])
        if order["cache"] is not None:
            options = options.model_copy(update={"cache_tokens": _with_room(policy, int(order["cache"]))})
        engine = make_engine(options, policy, int(order["seed"]), self._sink)
        self._policy, self._driver, self._id, self._version = policy, EngineDriver(engine), order["id"], -1
        return {
            "name": engine.name,
            "context": engine.context,
            "in_place_of": engine.in_place_of,
            "capacity": engine.capacity,
        }

    @torch.no_grad()
    def take_weights(self, order: dict[str, Any]) -> dict[str, Any]:
        """Overwrite the weights in place with those in files; unfinished responses go on with them."""
        policy, driver = self._policy, self._driver
        if policy is None or driver is None or order["id"] != self._id:
            return {"is_stale": True}
        parameters = policy.parameters()
        for file in order["files"]:
            for name, tensor in load_file(Path(order["folder"]) / file).items():
                parameters.pop(name).detach().copy_(tensor)
        assert not parameters, "every trained weight is sent"
        fault_point("server.weights")
        self._version = int(order["version"])
        driver.engine.update_weights(self._version)
        return {}

    def probe(self, order: dict[str, Any]) -> dict[str, Any]:
        """What the policy says about a prompt. The engine generates with the same weights, and may have other work."""
        policy = self._policy
        if policy is None or order["id"] != self._id or order["version"] != self._version:
            return {"is_stale": True}
        prompt = [int(token) for token in order["prompt"]]
        return {"ids": prompt, "logprobs": policy_logprobs(policy, prompt).tolist()}

    def end(self, session: str) -> None:
        """Nothing more of this session is wanted."""
        for work in [work for work in (*self._running, *self._queue) if work.session == session]:
            self._drop(work)
        if self._holder is not None and self._holder.session == session:
            self._holder = None

    def _unload(self) -> None:
        for work in (*self._running, *self._queue):
            self._finish(work, {"is_stale": True})
        self._queue.clear()
        self._holder = None
        if self._driver is not None:
            self._driver.engine.close()
        self._driver = self._policy = None
        self._id = ""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- the order of work -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Begin what may begin. The session that has the engine goes before; all others wait in the order in which they
        came."""
        now, waiting, is_blocked = time.monotonic(), list(self._queue), False
        self._queue.clear()
        for work in waiting:
            if work.is_over:
                continue
            if self._holder is not None and work.session == self._holder.session and not work.start:
                self.end(work.session)  # its client lost the connection, and begins again
            if self._is_stale(work):
                self._finish(work, {"is_stale": True})
            elif self._holder is not None and work.session == self._holder.session:
                if work.start == self._holder.begun:
                    self._next_batch(work)
                else:
                    self._finish(work, {"is_unknown": True})
            elif is_blocked or not self._is_free_for(work, now):
                is_blocked = True
                self._queue.append(work)
            elif work.start:
                self._finish(work, {"is_unknown": True})
            else:
                if work.session is not None:
                    assert self._driver is not None
                    self._driver.engine.reset_prefix_cache()
                    self._holder = _Holder(work.session, 0, now, work.is_whole)
                self._next_batch(work)

    def _is_stale(self, work: Work) -> bool:
        return self._driver is None or work.model != self._id or work.version > self._version

    def _is_free_for(self, work: Work, now: float) -> bool:
        assert self._driver is not None
        is_idle = not self._driver.active
        if self._holder is not None and is_idle and now - self._holder.touched > HOLD_SECONDS:
            self._holder = None
        return self._holder is None and (is_idle or work.session is None)

    def _next_batch(self, work: Work) -> None:
        """Hand the next batch of this work to the engine, or end it after its last."""
        assert self._driver is not None
        if work.begun == len(work.batches):
            self._finish(work, None)
            if self._holder is not None and work.session == self._holder.session and self._holder.is_whole:
                self._holder = None
            return
        batch = work.batches[work.begun]
        work.begun, work.owed = work.begun + 1, sum(request.n for request in batch)
        if self._holder is not None:
            self._holder.begun, self._holder.touched = self._holder.begun + 1, time.monotonic()
        self._said = self._said if self._running else time.perf_counter()
        self._running.add(work)
        work.call = self._driver.submit(batch, lambda event: self._hear(work, event))

    def _hear(self, work: Work, event: CallEvent) -> None:
        if isinstance(event, Completion):
            work.owed -= 1
            now = time.perf_counter()
            work.put(Sample(event, now - self._said))
            self._said = now
            fault_point("server.sample")
            if self._holder is not None:
                self._holder.touched = time.monotonic()
            if not work.owed:
                self._next_batch(work)
        elif isinstance(event, ApiError):
            self._finish(work, event)
            self._let_go(work)

    def _drop(self, work: Work) -> None:
        work.is_over = True
        if work in self._running:
            assert self._driver is not None and work.call is not None
            self._running.remove(work)
            self._driver.drop(work.call)
            self._let_go(work)

    def _let_go(self, work: Work) -> None:
        """Others may have the engine that this work's session had."""
        if self._holder is not None and work.session == self._holder.session:
            self._holder = None

    def _finish(self, work: Work, event: Event) -> None:
        self._running.discard(work)
        if not work.is_over:
            work.is_over = True
            work.put(event)
            if event is not None:
                work.put(None)


def _with_room(policy: Policy, wanted: int) -> int:
    """Tokens of a cache: all that are wanted, or what a GPU that holds nothing but the weights has room for."""
    from lemma.engines.native.engine import BLOCK
    from lemma.engines.native.sizes import bytes_per_token

    if policy.device.type != "cuda":
        return wanted
    free, _ = torch.cuda.mem_get_info(policy.device)
    return max(BLOCK, min(wanted, int(CACHE_SHARE * free // bytes_per_token(policy))))
