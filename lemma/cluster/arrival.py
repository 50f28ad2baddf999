"""What ranks tell each other through their store before they are a group: where they are reached, and what they have.

gloo binds to the address of the host's name, which on many machines is one of the loopback or none at all. Lemma takes
the interface on which a rank reaches the first one, and tries the way to every other machine before gloo does.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lemma.config.document import leaves
from lemma.core.errors import UserError
from lemma.core.version import installed_version

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
SETTINGS = "the command"
LOCAL = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
# How long a connection between two machines may take.
REACH_SECONDS = 10.0
# How long the first rank waits until all others have heard why they end.
HEARD_SECONDS = 5.0
# How long a late rank waits before it takes an ending for its own start's: after a restart, the store holds an old one.
LATE_SECONDS = 30.0
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Arrival:
    """A rank, as it tells the others. `first` is the address of the first rank, as seen from here."""

    host: str
    address: str
    first: str
    marks: dict[str, str]


Word = dict[str, str]
"""What a rank tells at the start: `token`, new for each of its starts, and `ending`, why it ends, if it does."""


def agreed_start(store: Any, rank: int, size: int, seconds: float, ending: str = "") -> str:
    """A name for this start of the ranks. The store of a launcher remembers earlier starts, and launchers on different
    machines may count them differently: the first rank names the start, and confirms whom it has heard of. `ending` is
    why this rank ends in place of taking part; then all ranks that are there raise it."""
    own = {"token": secrets.token_hex(8), "ending": ending}
    if rank == 0:
        return _lead_start(store, own, size, seconds)
    start, since, until = "", 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        if store.check(["start"]):
            named = store.get("start").decode()
            if named != start:
                start, since = named, time.monotonic()
            store.set(f"{start}/{rank}", json.dumps(own))
            heard = json.loads(store.get(f"{start}/go")) if store.check([f"{start}/go"]) else {}
            if heard.get(str(rank)) == own:
                store.set(f"{start}/told/{rank}", "")
                _end_together(heard)
                return start
            if str(rank) not in heard and time.monotonic() > since + LATE_SECONDS:
                _end_together(heard)
        time.sleep(LOOK_SECONDS)
    raise UserError(f"rank {rank} waited {seconds:.0f} s, and rank 0 did not come", fix="see what it says")


def _lead_start(store: Any, own: Word, size: int, seconds: float) -> str:
    start = own["token"]
    store.set("start", start)
    heard = {"0": own} | _heard(store, start, size, HEARD_SECONDS if own["ending"] else seconds)
    late = [rank for rank in map(str, range(size)) if rank not in heard]
    if late and not any(word["ending"] for word in heard.values()):
        shown = ", ".join(late[:8]) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
        raise UserError(
            f"rank 0 waited {seconds:.0f} s for the others, and rank{'s' * (len(late) > 1)} {shown} did not come",
            fix=f"start {size} ranks in all, and see what those say that are missing",
        )
    store.set(f"{start}/go", json.dumps(heard))
    try:
        _end_together(heard)
    except UserError:
        with suppress(RuntimeError):  # the store may go with this rank
            told = [f"{start}/told/{rank}" for rank in heard if rank != "0"]
            store.wait(told, timedelta(seconds=HEARD_SECONDS))
        raise
    return start


def _heard(store: Any, start: str, size: int, seconds: float) -> dict[str, Word]:
    """The word of each other rank that is there in time. Where one of them ends, there is little time."""
    words: dict[str, Word] = {}
    until = time.monotonic() + seconds
    while len(words) < size - 1 and time.monotonic() < until:
        for rank in map(str, range(1, size)):
            if rank not in words and store.check([f"{start}/{rank}"]):
                words[rank] = json.loads(store.get(f"{start}/{rank}"))
                if words[rank]["ending"]:
                    until = min(until, time.monotonic() + HEARD_SECONDS)
        time.sleep(LOOK_SECONDS / 2)
    return words


def _end_together(heard: Mapping[str, Word]) -> None:
    """Raise why the first of these ranks ends, if one does."""
    for rank, word in heard.items():
        if word["ending"]:
            raise UserError(f"rank {rank} on {word['ending']}")


class Lobby:
    """The store, before the ranks are a group: everybody tells something and hears what the others tell."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float):
        self.store, self.rank, self.size, self._seconds = store, rank, size, seconds
        self._count = 0

    def gather(self, mine: Any) -> list[Any]:
        """What every rank gives, in the order of ranks. Every rank must call this alike."""
        self._count += 1
        keys = [f"{self._count}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(mine))
        self.store.wait(keys, timedelta(seconds=self._seconds))
        return [json.loads(value) for value in self.store.multi_get(keys)]

    def agree(self, trouble: str | None) -> None:
        """Go on where nobody has found a trouble; otherwise all raise the first."""
        found = next((one for one in self.gather(trouble) if one is not None), None)
        if found is None:
            return
        self.store.set(f"heard/{self.rank}", "")
        if self.rank == 0:  # with whom the store may go
            with suppress(RuntimeError):
                self.store.wait([f"heard/{rank}" for rank in range(self.size)], timedelta(seconds=HEARD_SECONDS))
        raise UserError(found)


@contextmanager
def arrived(lobby: Lobby, master: str, port: int, settings: Mapping[str, Any], on_gpu: bool) -> Iterator[None]:
    """Within `with`, gloo uses the interface on which the others reach this rank. What differs between machines and
    must not, Lemma's code, its packages and `settings`, is refused."""
    told, trouble = os.environ.get(INTERFACE), None
    first = mine = LOCAL
    try:
        first = address_of_name(master, port)
        mine = _address_on(told.split(",")[0]) if told else _own_address(first, port)
    except UserError as error:
        trouble = str(error)
    if lobby.rank == 0:
        lobby.store.set("settings", json.dumps(settings))
    me = Arrival(socket.gethostname(), mine, first, own_marks(settings, on_gpu))
    everybody = [Arrival(**one) for one in lobby.gather(asdict(me))]
    lobby.agree(trouble or _differing(lobby, everybody, settings))
    if not told and is_loopback(mine):
        mine = _seen_by_others(everybody) or mine
    interface = told or _interface_of(mine)
    if interface and not told:
        mine = _address_on(interface)
    lobby.agree(_unreached(lobby, [one.host for one in everybody], lobby.gather(mine)))
    with _environment(INTERFACE, interface):
        yield


@contextmanager
def on_loopback() -> Iterator[None]:
    """Within `with`, gloo stays on this machine, whatever the host's name stands for."""
    with _environment(INTERFACE, os.environ.get(INTERFACE) or _interface_of(LOCAL)):
        yield


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


# --- what must be alike --------------------------------------------------------------------------------------------


def own_marks(settings: Mapping[str, Any], on_gpu: bool) -> dict[str, str]:
    """What every machine must have alike, by a name for people. A run on CPUs does not use FlashAttention."""
    code, folder = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        if not path.is_file() or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        code.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    marks = {"the code of Lemma": code.hexdigest()[:12], "Python": platform.python_version().rpartition(".")[0]}
    marks |= {name: version(name) for name in PACKAGES}
    marks["flash-attn-4"] = (on_gpu and installed_version("flash-attn-4")) or "none"
    text = json.dumps(settings, sort_keys=True)
    return marks | {SETTINGS: hashlib.sha256(text.encode()).hexdigest()}


def _differing(lobby: Lobby, everybody: list[Arrival], settings: Mapping[str, Any]) -> str | None:
    """A sentence about the first thing that this rank has otherwise than the first one."""
    first, mine = everybody[0], everybody[lobby.rank]
    name = next((name for name, mark in mine.marks.items() if first.marks.get(name) != mark), None)
    if name is None:
        return None
    was, now = first.marks.get(name), mine.marks[name]
    if name == SETTINGS:
        theirs, own = leaves(json.loads(lobby.store.get("settings"))), leaves(json.loads(json.dumps(settings)))
        name = next((key for key in [*own, *theirs] if own.get(key) != theirs.get(key)), SETTINGS)
        was, now = theirs.get(name, "not there"), own.get(name, "not there")
    return (
        f"{name} is {now} for rank {lobby.rank} on {mine.host}, and {was} for rank 0 on {first.host}; "
        "give all machines the same"
    )


# --- addresses -----------------------------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_of_name(master: str, port: int) -> str:
    """The address of the first rank's machine, as its name is read here."""
    try:
        found = socket.getaddrinfo(master, port, type=socket.SOCK_STREAM)
        return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR is '{master}', a name that {socket.gethostname()} cannot resolve ({error.strerror})",
            fix="give an IP address of the machine of rank 0; with torchrun, as its --local-addr",
        ) from error


def _own_address(first: str, port: int) -> str:
    """The address from which this rank reaches the first one; no packet is sent."""
    family = socket.AF_INET6 if ":" in first else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((first, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} has no way to MASTER_ADDR {first} ({error.strerror})",
            fix="give an address of the machine of rank 0 that all machines reach",
        ) from error


def _seen_by_others(arrivals: list[Arrival]) -> str | None:
    """On the first rank's machine, whose name may stand for its loopback: the address that other machines know."""
    for one in arrivals:
        if not is_loopback(one.first) and _interface_of(one.first):
            return one.first
    return None


def _addresses() -> dict[str, list[str]]:
    """Of each interface its addresses, in the order in which gloo looks at them."""
    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address for one in there if one.family in kinds] for name, there in psutil.net_if_addrs().items()
    }


def _interface_of(address: str) -> str | None:
    wanted = address.partition("%")[0]
    return next(
        (name for name, there in _addresses().items() if wanted in [one.partition("%")[0] for one in there]), None
    )


def _address_on(interface: str) -> str:
    """The address of an interface that gloo takes."""
    there = _addresses()
    if not there.get(interface):
        names = ", ".join(sorted(name for name, own in there.items() if own))
        raise UserError(
            f"{INTERFACE} is '{interface}', and the interfaces of {socket.gethostname()} are {names}",
            fix="name one of them, or leave it out",
        )
    return there[interface][0]


# --- the way between machines --------------------------------------------------------------------------------------


def _unreached(lobby: Lobby, hosts: list[str], addresses: list[str]) -> str | None:
    """Try connections between the first ranks of all machines; a sentence about one that does not come through."""
    gates = [rank for rank, address in enumerate(addresses) if addresses.index(address) == rank]
    mine, is_asked = addresses[lobby.rank], lobby.rank in gates
    with ExitStack() as stack:
        port = 0
        if is_asked:
            family = socket.AF_INET6 if ":" in mine else socket.AF_INET
            door = stack.enter_context(socket.create_server((mine, 0), family=family, backlog=len(gates)))
            port = door.getsockname()[1]
        ports = lobby.gather(port)
        others = [rank for rank in gates if rank != lobby.rank] if is_asked else []
        trouble = None
        for other in others:
            try:
                socket.create_connection((addresses[other], ports[other]), timeout=REACH_SECONDS).close()
            except OSError as error:
                trouble = (
                    f"rank {lobby.rank} on {hosts[lobby.rank]} ({mine}) does not reach rank {other} on {hosts[other]} "
                    f"at {addresses[other]} ({error.strerror or error}); open all ports between the machines, or name "
                    f"the interface that joins them in {INTERFACE}"
                )
                break
        lobby.gather(None)  # before the doors are closed
    return trouble
