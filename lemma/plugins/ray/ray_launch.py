"""`lemma train --ray`: ranks and vLLM servers on a Ray cluster that runs already.

Each rank is the program that torchrun would start, with the same variables, in a process under an actor of its own. The
run folder is on a file system that all nodes share. A rank that dies ends the others, and the group starts again with
another port; a server that dies starts again at its address.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lemma.cluster.launching import Launcher
from lemma.core.errors import UserError
from lemma.core.rank_objects import KEY_VARIABLE as RANKS_KEY
from lemma.plugins.ray.ray_actors import Home, ProcessActor

PLACE_SECONDS = 120.0  # until the cluster has room
CALL_SECONDS = 60.0  # until an actor answers
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
class ActorProcess:
    """The process of an actor, as a launcher sees it: its place in the cluster, and the part of its output that was
    read."""

    actor: Any
    home: Home
    bundle: int
    is_shown: bool = False
    offset: int = 0

    def poll(self) -> int | None:
        """The exit status; None while it runs, -9 where its actor is gone."""
        import ray

        try:
            status, text, self.offset = _get(self.actor.look.remote(self.offset))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return -signal.SIGKILL
        if self.is_shown and text:
            print(text, end="", flush=True)
        return status

    def send_signal(self, sig: int) -> None:
        self.actor.interrupt.remote(sig)

    def last_words(self) -> str:
        import ray

        try:
            return str(_get(self.actor.last_words.remote()))
        except ray.exceptions.RayError as error:
            return f"its actor is gone ({type(error).__name__})"


@dataclass
class _Group:
    spec: RayJobSpec
    placement: Any
    ranks: list[ActorProcess] = field(default_factory=list)
    servers: list[ActorProcess] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def urls(self) -> list[str]:
        return [f"http://{one.home.address}:{port}" for one, port in zip(self.servers, self.ports, strict=True)]

    def alive(self, one: ActorProcess) -> ActorProcess:
        """This one, or a new actor in the place of one that is gone."""
        import ray

        try:
            _get(one.actor.home.remote())
            return one
        except ray.exceptions.RayError:
            return _actor(self.placement, one.bundle, self.placement.bundle_specs[one.bundle])


def launch_on_ray(spec: RayJobSpec) -> int:
    """Run until all ranks have ended; the exit status of the run."""
    import ray

    with _connected():
        gpus = int(ray.cluster_resources().get("GPU", 0)) if spec.wants_gpus else 0
        count = spec.ranks or max(1, gpus - len(spec.servers))
        with _placed(spec, count, bool(gpus)) as group:
            for number in range(len(group.servers)):
                _start_server(group, number)
            return RayLauncher(group).run()


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


def _actor(placement: Any, index: int, bundle: dict[str, float]) -> ActorProcess:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=placement, placement_group_bundle_index=index)
    made = ray.remote(ProcessActor).options(
        num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy, max_restarts=0
    )
    actor: Any = made.remote()
    return ActorProcess(actor, _get(actor.home.remote()), index)


def _get(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=CALL_SECONDS)


def _by_node(ranks: Sequence[ActorProcess]) -> list[ActorProcess]:
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


class RayLauncher(Launcher):
    """Ranks in actors. Those that are gone are replaced before the next attempt, and servers as soon as it is seen."""

    poll_seconds, cause_seconds = 0.5, 2.0

    def __init__(self, group: _Group):
        spec, self._group = group.spec, group
        super().__init__(
            spec.arguments, len(group.ranks), spec.run_folder, restarts=spec.restarts, fresh=spec.fresh,
            say=lambda text: print(f"lemma: {text}", file=sys.stderr, flush=True),
        )  # fmt: skip

    def environments(self, attempt: int, meeting: Path) -> list[dict[str, str]]:
        self._group.ranks = _by_node([self._group.alive(one) for one in self._group.ranks])
        port = _get(self._group.ranks[0].actor.free_port.remote())
        more = {KEY_VARIABLE: self._group.key} if self._group.servers else {}
        return [one | more for one in variables_of([one.home for one in self._group.ranks], port)]

    def start_rank(self, command: Sequence[str], env: dict[str, str], output: Path | None) -> ActorProcess:
        spec, one = self._group.spec, self._group.ranks[int(env["RANK"])]
        one.is_shown, one.offset = output is None, 0
        alone = ["--ranks=1"] if spec.module == "lemma" else []
        told = [f"--set=stages.{name}.rollout.engine.servers={json.dumps(self._group.urls)}" for name in spec.stages]
        _get(one.actor.start.remote(spec.module, [*command, *alone, *told], env, str(Path.cwd())))
        return one

    def end_rank(self, rank: ActorProcess) -> None:
        with suppress(Exception):  # it may be gone already
            _get(rank.actor.kill.remote())

    def name_of(self, rank: int) -> str:
        return f"rank {rank} on {self._group.ranks[rank].home.address}"

    def last_words(self, meeting: Path, rank: int) -> str:
        return f"{self.name_of(rank)}: {self._group.ranks[rank].last_words()}"

    def look(self) -> None:
        """A server that ended starts again at its address, in another actor where that is gone too."""
        for number, one in enumerate(self._group.servers):
            if one.poll() is not None:
                self._say(f"warning: vLLM server {number + 1} ended: {one.last_words()}; it starts again")
                self._group.servers[number] = self._group.alive(one)
                _start_server(self._group, number)
