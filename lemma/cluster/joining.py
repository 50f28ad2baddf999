"""Joining the ranks of a run, by the environment that `lemma train`, torchrun, `accelerate launch`, Slurm or Ray made.

Objects travel over gloo. Tensors travel over NCCL where every rank of a host has a GPU of its own, and otherwise over
gloo, through the host's memory.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from lemma.cluster.arrival import LOCAL, LOOK_SECONDS, Lobby, address_of_name, agreed_start, arrived, on_loopback
from lemma.cluster.cluster_options import ClusterOptions
from lemma.cluster.rank_watch import LOST, RankLost, RankWatch, reason_of, say_loss
from lemma.core.errors import UserError
from lemma.core.rank_objects import KEY_VARIABLE
from lemma.core.rank_place import RankPlace, number_of_environment, place_of
from lemma.core.ranks import RankWorld, gather_over_ranks, joined
from lemma.core.roll_call import roll_call

# How long ranks wait for those that are not there yet: with other machines, and at least with one launcher, which
# starts all of them at once.
START_SECONDS, LAUNCHED_SECONDS = 300.0, 60.0
# How long after torch's own limit for a connection a rank gives up: torch has none for a peer that accepts but is mute.
ANSWER_SECONDS = 5.0
# How long a rank that ends before the start tries to tell the others, for each step of it.
WORD_SECONDS = 10.0
PORT_FILE = "port"

_rendezvous_started = False
"""Whether this rank has gone to meet the others."""


@contextmanager
def member(
    options: ClusterOptions, device: str, settings: Mapping[str, Any] | None = None, folder: Path | None = None
) -> Iterator[RankWorld]:
    """Within `with`, this process is one of the ranks that its environment names; alone where it names none.

    All ranks must have the same settings and see the same run folder.
    """
    place = place_of()
    if place is None:
        yield RankWorld()
        return
    import torch.distributed as dist

    key = shared_key()
    store, second = _stores(place, _start_seconds(options))
    limit = timedelta(seconds=options.deadline)
    has_own_gpu = _take_gpu(place, device)
    watch = RankWatch(second, place.rank, place.size, options.patience)
    watch.start()
    with ExitStack() as stack:
        stack.callback(watch.stop)
        # Under `accelerate launch` with FSDP, transformers would load weights on the first rank only.
        os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
        with watch.waiting("the start"):
            stack.enter_context(_reached(store, place, settings or {}, device))
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=limit)
        control, carrier = dist.group.WORLD, dist.group.WORLD
        world = RankWorld(place.rank, place.size, 1, control, carrier, waiting=watch.waiting, note=watch.note, key=key)
        with joined(world):
            with watch.waiting("the start"):
                world.aside = dist.new_group(backend="gloo", timeout=limit)
            if all(gather_over_ranks(has_own_gpu, "who has a GPU")):
                world.carrier, world.on_device = dist.new_group(backend="nccl", timeout=limit), True
            try:
                if folder is not None:
                    roll_call(folder, "run.dir")
                yield world
            except UserError as error:
                watch.tell_failure(str(error))
                raise
            gather_over_ranks(None, "the end")
            watch.stop()  # not before: others may still write for longer than a rank may be silent
    dist.destroy_process_group()


def _reached(store: Any, place: RankPlace, settings: Mapping[str, Any], device: str) -> AbstractContextManager[None]:
    """Within `with`, gloo uses an interface on which all ranks reach each other."""
    from torch.distributed import PrefixStore

    if "LEMMA_MEETING" in os.environ:
        return on_loopback()
    lobby = Lobby(PrefixStore("arrival", store), place.rank, place.size, START_SECONDS)
    return arrived(lobby, os.environ["MASTER_ADDR"], number_of_environment("MASTER_PORT"), settings, _has_gpu(device))


def _start_seconds(options: ClusterOptions) -> float:
    if "LEMMA_MEETING" not in os.environ:
        return START_SECONDS
    return min(START_SECONDS, max(LAUNCHED_SECONDS, options.deadline))


def _stores(place: RankPlace, seconds: float) -> tuple[Any, Any]:
    """Two connections to the store at which the ranks meet, of which a restart never sees anything again."""
    from torch.distributed import PrefixStore, TCPStore

    limit = timedelta(seconds=seconds)
    meeting = os.environ.get("LEMMA_MEETING")
    if meeting is not None:
        address, file = LOCAL, Path(meeting) / PORT_FILE
        first = _local_store(0, limit) if place.rank == 0 else None
        if first is not None:
            file.with_suffix(".new").write_text(str(first.port))
            file.with_suffix(".new").replace(file)
        port = _port(file, seconds)
    else:
        global _rendezvous_started
        _rendezvous_started = True
        address, port = _meeting_point()
        with _answered(place.rank, seconds + ANSWER_SECONDS):
            first = _opened_store(address, port, place.rank, seconds)
    with _answered(place.rank, seconds):
        first = first or TCPStore(address, port, None, False, limit)
        second = TCPStore(address, port, None, False, timedelta(seconds=30))
    prefix = _prefix()
    if meeting is None:
        start = agreed_start(PrefixStore(prefix, first), place.rank, place.size, seconds)
        prefix = f"{prefix}/{start}"
    return PrefixStore(f"{prefix}/group", first), PrefixStore(f"{prefix}/watch", second)


def _local_store(port: int, limit: timedelta) -> Any:
    """A store that only this machine reaches: by itself, torch listens on all interfaces."""
    from torch.distributed import TCPStore

    with socket.create_server((LOCAL, port)) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            LOCAL, port, None, True, limit, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
        )


def _meeting_point() -> tuple[str, int]:
    """The address and the port that the environment names."""
    address, port = os.environ.get("MASTER_ADDR", ""), number_of_environment("MASTER_PORT")
    if not address:
        raise UserError("MASTER_ADDR is missing in the environment", fix="start with torchrun")
    if not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT is {port}, and there is no such port", fix="choose one from 1024 to 65535")
    return address_of_name(address, port), port


def _prefix() -> str:
    return f"lemma/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"


def report_early_exit(sentence: str) -> None:
    """Where this process is a rank that ends before it has met the others, tell them why: they would wait for it.
    Lemma's own launcher sees it end."""
    with suppress(UserError):
        place = place_of()
        if place is None or _rendezvous_started or "LEMMA_MEETING" in os.environ:
            return
        address, port = _meeting_point()
        if place.rank > 0 and not _is_open(address, port, WORD_SECONDS):
            return
        import torch.distributed  # noqa: F401 - it may take longer than the limit below

        # in a thread: torch has no limit for a store that accepts and never answers
        telling = threading.Thread(target=_report, args=(place, address, port, sentence), daemon=True)
        telling.start()
        telling.join(2 * WORD_SECONDS)


def _report(place: RankPlace, address: str, port: int, sentence: str) -> None:
    from torch.distributed import PrefixStore

    with suppress(UserError, RuntimeError):
        store = _opened_store(address, port, place.rank, WORD_SECONDS)
        ending = f"{socket.gethostname()}: {sentence}"
        agreed_start(PrefixStore(_prefix(), store), place.rank, place.size, WORD_SECONDS, ending)


def _is_open(address: str, port: int, seconds: float) -> bool:
    """Whether somebody listens there in time: torch logs every failed attempt, so poll the port first."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection((address, port), timeout=1.0):
            return True
        time.sleep(LOOK_SECONDS)
    return False


@contextmanager
def _answered(rank: int, seconds: float) -> Iterator[None]:
    """Within `with`, this rank connects to the store; it ends where a first rank that stands still never answers, for
    which torch has no limit."""
    sentence = "rank 0 was there and does not answer at the start"

    def give_up() -> None:
        say_loss(sentence, rank)
        os._exit(LOST)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"{sentence} ({reason_of(error)})") from error
    finally:
        timer.cancel()


def _opened_store(address: str, port: int, rank: int, seconds: float) -> Any:
    """A connection to the store at an address that the user gave; the first rank may have to make the store."""
    from torch.distributed import TCPStore

    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if hosts and os.environ["MASTER_ADDR"] in ("localhost", LOCAL):
            return _local_store(port, timedelta(seconds=seconds))
        return TCPStore(address, port, None, hosts, timedelta(seconds=seconds), wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        host, reason = socket.gethostname(), str(error).splitlines()[0][:200]
        if "EADDRINUSE" in str(error) or getattr(error, "errno", 0) == errno.EADDRINUSE:
            raise UserError(f"port {port} is taken on {host}", fix="choose another MASTER_PORT") from error
        raise UserError(
            f"rank {rank} on {host} does not reach the first rank at {address}, port {port} ({reason})",
            fix="see that MASTER_ADDR is the machine of rank 0, that rank 0 runs, and that the port is open",
        ) from error


def _port(file: Path, seconds: float) -> int:
    began = time.monotonic()
    while not file.exists():
        if time.monotonic() - began > seconds:
            raise RankLost(f"rank 0 did not start within {seconds:.0f} s")
        time.sleep(0.02)
    return int(file.read_text())


def _has_gpu(device: str) -> bool:
    """Whether this rank computes on a GPU."""
    import torch

    return device != "cpu" and torch.cuda.is_available()


def _take_gpu(place: RankPlace, device: str) -> bool:
    """Take the GPU of this rank's number on its host; whether no other rank of the host takes the same."""
    import torch

    if not _has_gpu(device):
        return False
    count = torch.cuda.device_count()
    torch.cuda.set_device(place.local_rank % count)
    return place.local_size <= count


def shared_key() -> bytes:
    """The key that a launcher or the user gave, else the one in the user's home, which is made where there is none."""
    given = os.environ.get(KEY_VARIABLE)
    return given.encode() if given else _key_of_home()


def _key_of_home() -> bytes:
    file = Path(os.environ.get("LEMMA_CACHE") or "~/.cache/lemma").expanduser() / "ranks.key"
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            whole = file.with_name(f"ranks-{secrets.token_hex(8)}.key")
            with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                opened.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another rank was first
                os.link(whole, file)
            whole.unlink()
        return file.read_bytes()
    except OSError as error:
        raise UserError(
            f"the key of the ranks cannot be kept in {file} ({error.strerror})",
            fix=f"set {KEY_VARIABLE} to the same secret for all ranks",
        ) from error
