"""`lemma train --ray`: ranks and vLLM servers on a Ray cluster that runs already.

Each rank is the program that torchrun would start, with the same variables, in a process under an actor of its own. The
run folder is on a file system that all nodes share. A rank that dies ends the others, and the group starts again with
another port; a server that dies starts again at its address.
"""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lemma.cluster.launching import FreshStart, progress
from lemma.cluster.rank_watch import LOST
from lemma.core.errors import UserError
from lemma.core.ranks import KEY_VARIABLE as RANKS_KEY
from lemma.core.terminal import visible
from lemma.plugins.ray.ray_actors import Home, ProcessActor

POLL_SECONDS = 0.5
CAUSE_SECONDS = 2.0  # until the rank that failed first can be told from those that lost it
PLACE_SECONDS = 120.0  # until the cluster has room
CALL_SECONDS = 60.0  # until an actor answers
STOP_SECONDS = 600.0  # for ranks that were asked to save and end
USER_ERROR = 2  # the exit status of one sentence that a restart would only repeat
KEY_VARIABLE = "LEMMA_SERVERS_KEY"
SERVER_MODULE = "lemma.engines.vllm.stand_alone"


@dataclass(frozen=True)
class RayJobSpec:
    """What is to be placed. `arguments` are those of `lemma` but `--fresh`, which is `fresh`; `servers` has those of
    each server, without its address; `stages` are told where the servers are."""

    arguments: Sequence[str]
    ranks: int | None
    wants_gpus: bool
    restarts: int
    run_folder: Path
    servers: Sequence[Sequence[str]] = ()
    stages: Sequence[str] = ()
    fresh: bool = False
    module: str = "lemma"


@dataclass(slots=True)
class _Placed:
    """An actor with the place that it has and the part of its output that was read."""

    actor: Any
    home: Home
    bundle: int
    offset: int = 0


@dataclass
class _Group:
    spec: RayJobSpec
    placement: Any
    ranks: list[_Placed] = field(default_factory=list)
    servers: list[_Placed] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    key: str = field(default_factory=lambda: secrets.token_hex(16))


def launch_on_ray(spec: RayJobSpec) -> int:
    """Run until all ranks have ended; the exit status of the run."""
    import ray

    with _connected():
        gpus = int(ray.cluster_resources().get("GPU", 0)) if spec.wants_gpus else 0
        count = spec.ranks or max(1, gpus - len(spec.servers))
        with _placed(spec, count, bool(gpus)) as group, _stop_asked() as asked:
            for number in range(len(group.servers)):
                _start_server(group, number)
            return _run(group, asked)


@contextmanager
def _connected() -> Iterator[None]:
    try:
        import ray
    except ImportError:
        raise UserError(
            "--ray needs the package ray, which is not installed", fix="install it: pip install ray"
        ) from None
    already = ray.is_initialized()
    if not already:
        try:
            ray.init(address="auto", log_to_driver=False, configure_logging=False, namespace="lemma")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"there is no Ray cluster: {str(error).splitlines()[0]}",
                fix="start one with `ray start --head`, or name it: RAY_ADDRESS=HOST:6379",
            ) from None
    try:
        yield
    finally:
        if not already:
            ray.shutdown()


@contextmanager
def _placed(spec: RayJobSpec, count: int, on_gpus: bool) -> Iterator[_Group]:
    """Actors for all ranks and servers, each with its share of the cluster, which is given back at the end."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = {"CPU": 1.0, **({"GPU": 1.0} if on_gpus else {})}
    total = count + len(spec.servers)
    placement = placement_group([bundle] * total, strategy="PACK")
    group = _Group(spec, placement)
    try:
        if not placement.wait(PLACE_SECONDS):
            what = "GPUs" if on_gpus else "CPUs"
            there = ray.available_resources().get(what[:-1], 0)
            raise UserError(
                f"the Ray cluster has no room for {count} ranks and {len(spec.servers)} servers: {there:g} {what} free",
                fix="take fewer with `cluster.ranks`, or wait for others to end",
            )
        everybody = [_actor(placement, index, bundle) for index in range(total)]
        group.ranks = _by_node(everybody[:count])
        group.servers = everybody[count:]
        group.ports = [_get(one.actor.free_port.remote()) for one in group.servers]
        yield group
    finally:
        for one in (*group.ranks, *group.servers):
            with suppress(Exception):  # it may be gone already
                _get(one.actor.close.remote())
        remove_placement_group(placement)


def _actor(placement: Any, index: int, bundle: dict[str, float]) -> _Placed:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=placement, placement_group_bundle_index=index)
    made = ray.remote(ProcessActor).options(
        num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy, max_restarts=0
    )
    actor: Any = made.remote()
    return _Placed(actor, _get(actor.home.remote()), index)


def _get(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=CALL_SECONDS)


def _by_node(ranks: Sequence[_Placed]) -> list[_Placed]:
    """Ranks of one node follow each other, as torchrun numbers them."""
    nodes = list(dict.fromkeys(one.home.node for one in ranks))
    return sorted(ranks, key=lambda one: (nodes.index(one.home.node), one.bundle))


def variables_of(homes: Sequence[Home], port: int) -> list[dict[str, str]]:
    """What torchrun would set for each rank, and all GPUs of its node that belong to the run."""
    nodes = list(dict.fromkeys(home.node for home in homes))
    variables, key = [], secrets.token_hex(32)
    for rank, home in enumerate(homes):
        mates = [other for other, at in enumerate(homes) if at.node == home.node]
        gpus = [gpu for other in mates for gpu in homes[other].gpus]
        values = {
            "RANK": rank,
            "WORLD_SIZE": len(homes),
            "LOCAL_RANK": mates.index(rank),
            "LOCAL_WORLD_SIZE": len(mates),
            "GROUP_RANK": nodes.index(home.node),
            "MASTER_ADDR": homes[0].address,
            "MASTER_PORT": port,
            RANKS_KEY: key,
        }
        variables.append({name: str(value) for name, value in values.items()})
        if gpus:
            variables[-1]["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables


def _start_server(group: _Group, number: int) -> None:
    server = group.servers[number]
    arguments = [*group.spec.servers[number], "--host", "0.0.0.0", "--port", str(group.ports[number])]
    _get(server.actor.start.remote(SERVER_MODULE, arguments, {KEY_VARIABLE: group.key}, str(Path.cwd())))


def _start_ranks(group: _Group, fresh: Sequence[str]) -> None:
    homes = [one.home for one in group.ranks]
    port = _get(group.ranks[0].actor.free_port.remote())
    urls = [f"http://{one.home.address}:{port}" for one, port in zip(group.servers, group.ports, strict=True)]
    told = [f"--set=stages.{name}.rollout.engine.servers={urls}" for name in group.spec.stages if urls]
    alone = ["--ranks=1"] if group.spec.module == "lemma" else []
    arguments = [*group.spec.arguments, *fresh, *alone, *(one.replace("'", '"') for one in told)]
    for one, variables in zip(group.ranks, variables_of(homes, port), strict=True):
        one.offset = 0
        own = variables | ({KEY_VARIABLE: group.key} if urls else {})
        _get(one.actor.start.remote(group.spec.module, arguments, own, str(Path.cwd())))


def _run(group: _Group, asked: threading.Event) -> int:
    """Attempt after attempt: a death without a step since the last one counts against the restarts."""
    folder = group.spec.run_folder
    fresh = FreshStart(folder, group.spec.fresh)
    deaths, steps = 0, progress(folder)
    while True:
        _start_ranks(group, fresh.words)
        status, words = _watch(group, asked)
        if status is None or status in (0, USER_ERROR):
            if words:
                print(visible(words), file=sys.stderr, flush=True)
            return 1 if status is None else status
        steps, now = fresh.progress_since(steps), progress(folder)
        deaths, steps = (1 if now > steps else deaths + 1), now
        if deaths > group.spec.restarts or asked.is_set():
            print(visible(f"error: {words}; the ranks died {deaths} times in a row"), file=sys.stderr, flush=True)
            return 1
        print(visible(f"warning: {words}; all ranks start again"), file=sys.stderr, flush=True)
        _replace_dead(group)


def _watch(group: _Group, asked: threading.Event) -> tuple[int | None, str]:
    """Until every rank has ended well, or one has not: the others are ended then. The first rank's output is shown."""
    end = None
    while True:
        if asked.is_set() and end is None:
            end = time.monotonic() + STOP_SECONDS
            for one in group.ranks:
                one.actor.interrupt.remote()
        states = [_look(one, rank == 0) for rank, one in enumerate(group.ranks)]
        if any(state not in (None, 0) for state in states):
            return _fall(group)
        if all(state == 0 for state in states):
            return 0, ""
        if end is not None and time.monotonic() > end:
            _end(group.ranks)
            return None, "the ranks did not end in time and were killed"
        _look_at_servers(group)
        time.sleep(POLL_SECONDS) if asked.is_set() else asked.wait(POLL_SECONDS)


def _fall(group: _Group) -> tuple[int, str]:
    """The first cause: the others noticed that somebody was lost, and may have ended before it was seen here."""
    time.sleep(CAUSE_SECONDS)
    states = {rank: _look(one, rank == 0) for rank, one in enumerate(group.ranks)}
    wrong = {rank: state for rank, state in states.items() if state not in (None, 0)}
    causes = {rank: state for rank, state in wrong.items() if state != LOST}
    rank, status = min((causes or wrong).items(), key=_how_likely_second)
    assert status is not None
    one = group.ranks[rank]
    said = f"rank {rank} on {one.home.address} ended with status {status}: {_words(one)}"
    _end(group.ranks)
    return status, "" if status == USER_ERROR and rank == 0 else said  # the first rank was heard already


def _how_likely_second(ended: tuple[int, int | None]) -> tuple[int, int]:
    """A user's error and a signal are causes; other failures may be what those who lost a rank said of it."""
    rank, status = ended
    return (0 if status == USER_ERROR else 1 if status is not None and status < 0 else 2), rank


def _look(one: _Placed, is_shown: bool) -> int | None:
    """The exit status of a rank; None while it runs, -9 where its actor is gone."""
    import ray

    try:
        status, text, one.offset = _get(one.actor.look.remote(one.offset))
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        return -signal.SIGKILL
    if is_shown and text:
        print(text, end="", flush=True)
    return status


def _words(one: _Placed) -> str:
    import ray

    try:
        return str(_get(one.actor.last_words.remote()))
    except ray.exceptions.RayError as error:
        return f"its actor is gone ({type(error).__name__})"


def _end(ranks: Sequence[_Placed]) -> None:
    for one in ranks:
        with suppress(Exception):  # it may be gone already
            _get(one.actor.kill.remote())


def _replace_dead(group: _Group) -> None:
    """A new actor in the place of each that is gone."""
    import ray

    bundles = group.placement.bundle_specs
    for index, one in enumerate(group.ranks):
        try:
            _get(one.actor.home.remote())
        except ray.exceptions.RayError:
            group.ranks[index] = _actor(group.placement, one.bundle, bundles[one.bundle])
    group.ranks = _by_node(group.ranks)


def _look_at_servers(group: _Group) -> None:
    """A server that ended starts again at its address, in another actor where that is gone too."""
    for number, one in enumerate(group.servers):
        if _look(one, False) is None:
            continue
        print(
            visible(f"warning: vLLM server {number + 1} ended: {_words(one)}; it starts again"),
            file=sys.stderr,
            flush=True,
        )
        import ray

        try:
            _get(one.actor.home.remote())
        except ray.exceptions.RayError:
            spec = group.placement.bundle_specs[one.bundle]
            group.servers[number] = _actor(group.placement, one.bundle, spec)
        _start_server(group, number)


@contextmanager
def _stop_asked() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM ask the ranks to save and end; within `with` this process waits for them."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.signal(number, lambda *_: event.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
