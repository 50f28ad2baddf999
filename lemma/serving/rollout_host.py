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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lemma.core.errors import UserError
from lemma.core.events import Sink
from lemma.core.faults import fault_point
from lemma.engines import make_engine
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Completion, Engine, EngineError, Key, Request
from lemma.engines.remote.native_servers import layout_of
from lemma.engines.remote.weights_probe import policy_logprobs
from lemma.models.load_model import build_policy, pick_device
from lemma.models.model_options import ModelOptions
from lemma.models.policy import Policy

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


Event = Sample | EngineError | dict[str, bool] | None
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
    left: dict[Key, int] = field(default_factory=dict)


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
        self._owners: dict[Key, Work] = {}
        self._holder: _Holder | None = None
        self._policy: Policy | None = None
        self._engine: Engine | None = None
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
            engine = self._engine
            if engine is None or not (engine.is_busy or engine.finished):
                self._wake.wait(IDLE_SECONDS)
                continue
            try:
                if engine.is_busy:
                    engine.work()
            except UserError as error:
                self._fail(error)
            self._deliver(engine)

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
        self._policy, self._engine, self._id, self._version = policy, engine, order["id"], -1
        return {
            "name": engine.name,
            "context": engine.context,
            "in_place_of": engine.in_place_of,
            "capacity": engine.capacity,
        }

    @torch.no_grad()
    def take_weights(self, order: dict[str, Any]) -> dict[str, Any]:
        """Overwrite the weights in place with those in files; unfinished responses go on with them."""
        policy, engine = self._policy, self._engine
        if policy is None or engine is None or order["id"] != self._id:
            return {"is_stale": True}
        parameters = policy.parameters()
        for file in order["files"]:
            for name, tensor in load_file(Path(order["folder"]) / file).items():
                parameters.pop(name).detach().copy_(tensor)
        assert not parameters, "every trained weight is sent"
        fault_point("server.weights")
        self._version = int(order["version"])
        engine.update_weights(self._version)
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
        for work in [work for work in {*self._owners.values(), *self._queue} if work.session == session]:
            self._drop(work)
        if self._holder is not None and self._holder.session == session:
            self._holder = None

    def _unload(self) -> None:
        for work in {*self._owners.values(), *self._queue}:
            self._finish(work, {"is_stale": True})
        self._queue.clear()
        self._owners.clear()
        self._holder = None
        if self._engine is not None:
            self._engine.close()
        self._engine = self._policy = None
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
                    assert self._engine is not None
                    self._engine.reset_prefix_cache()
                    self._holder = _Holder(work.session, 0, now, work.is_whole)
                self._next_batch(work)

    def _is_stale(self, work: Work) -> bool:
        return self._engine is None or work.model != self._id or work.version > self._version

    def _is_free_for(self, work: Work, now: float) -> bool:
        if self._holder is not None and not self._owners and now - self._holder.touched > HOLD_SECONDS:
            self._holder = None
        if work.session is not None:
            return self._holder is None and not self._owners
        return self._holder is None and not any(request.key in self._owners for request in work.batches[0])

    def _next_batch(self, work: Work) -> None:
        """Hand the next batch of this work to the engine, or end it after its last."""
        assert self._engine is not None
        holder = self._holder
        if work.begun == len(work.batches):
            self._finish(work, None)
            if holder is not None and work.session == holder.session and holder.is_whole:
                self._holder = None
            return
        batch = work.batches[work.begun]
        work.begun += 1
        if holder is not None:
            holder.begun, holder.touched = holder.begun + 1, time.monotonic()
        self._said = time.perf_counter() if not self._owners else self._said
        try:
            for request in batch:
                self._engine.submit(request)
                self._owners[request.key], work.left[request.key] = work, request.n
        except UserError as error:
            self._finish(work, _as_engine_error(error))
            self._drop(work)

    def _deliver(self, engine: Engine) -> None:
        while engine.finished:
            completion = engine.finished.popleft()
            work = self._owners.get(completion.key)
            if work is None or completion.finish == "cancelled":
                continue
            work.left[completion.key] -= 1
            if not work.left[completion.key]:
                del work.left[completion.key], self._owners[completion.key]
            now = time.perf_counter()
            work.put(Sample(completion, now - self._said))
            self._said = now
            fault_point("server.sample")
            if self._holder is not None:
                self._holder.touched = time.monotonic()
            if not work.left:
                self._next_batch(work)

    def _drop(self, work: Work) -> None:
        work.is_over = True
        for key in list(work.left):
            self._owners.pop(key, None)
            if self._engine is not None:
                self._engine.cancel(key)
        if work.left and self._holder is not None and work.session == self._holder.session:
            self._holder = None
        work.left.clear()

    def _finish(self, work: Work, event: Event) -> None:
        if not work.is_over:
            work.is_over = True
            work.put(event)
            if event is not None:
                work.put(None)

    def _fail(self, error: UserError) -> None:
        """The engine has dropped all requests: everybody who has any there is told."""
        for work in set(self._owners.values()):
            self._finish(work, _as_engine_error(error))
            work.left.clear()
        self._owners.clear()
        self._holder = None


def _as_engine_error(error: UserError) -> EngineError:
    return error if isinstance(error, EngineError) else EngineError(error.problem, fix=error.fix)


def _with_room(policy: Policy, wanted: int) -> int:
    """Tokens of a cache: all that are wanted, or what a GPU that holds nothing but the weights has room for."""
    from lemma.engines.native.engine import BLOCK
    from lemma.engines.native.sizes import bytes_per_token

    if policy.device.type != "cuda":
        return wanted
    free, _ = torch.cuda.mem_get_info(policy.device)
    return max(BLOCK, min(wanted, int(CACHE_SHARE * free // bytes_per_token(policy))))
