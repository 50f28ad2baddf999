"""Imports AppWorld once and forks a confined process for each world and each judgement.

    python fork_server.py SETTINGS

SETTINGS is JSON: `address` (a name in the abstract space of Unix sockets), `root` (of AppWorld's data), `limits`,
`sandbox`. One message on stdout, as child_frames.py packs it, says that the server is ready. It ends, with all its
worlds, when its standard input is closed: with whoever started it, however that one ends.

For each connection there is a keeper, which reads the first message, confines itself and forks the world. It ends the
world when the other side or the server is gone, and holds nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
for folder in ("../../../environments/confined", "../../../children"):
    sys.path.append(os.path.normpath(os.path.join(HERE, folder)))
import child_frames  # noqa: E402
import confinement  # noqa: E402
import syscall_filter  # noqa: E402
import world_child  # noqa: E402

WORLD = "/world"
KEPT = ("PATH", "LANG", "TZ", "PYTHONHASHSEED", "HOME", "APPWORLD_ROOT", "APPWORLD_CACHE")


def main() -> None:
    settings = json.loads(sys.argv[1])
    world_child.warm(settings["root"])
    # AppWorld reads any `.env` above its folder: nothing of it belongs to agents.
    for name in [name for name in os.environ if name not in KEPT]:
        del os.environ[name]
    settings["mapped"] = confinement.mapped_bytes()
    settings["sandbox"], missing = confinement.strongest(settings["sandbox"])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + settings["address"])
    listener.listen(256)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    life, held = os.pipe()
    os.write(1, child_frames.pack({"sandbox": settings["sandbox"], "missing": missing}))
    while True:
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in ready and not os.read(0, 1):
            os._exit(0)
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            if peer_user(connection) == os.getuid() and os.fork() == 0:
                listener.close()
                os.close(held)
                keep(connection, life, settings)
            connection.close()


def peer_user(connection: socket.socket) -> int:
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", given)[1])


def keep(connection: socket.socket, life: int, settings: dict[str, Any]) -> None:
    """Begin a world and watch it. Never returns."""
    folder = ""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        proc = os.open("/proc", os.O_RDONLY)
        connection.settimeout(30)
        message = child_frames.receive(connection.recv)
        connection.settimeout(None)
        view = view_of(settings["root"], message["task"], with_gold=message["call"] == "judge")
        if settings["sandbox"] == "namespaces":
            confinement.enter_namespaces()
            confinement.enter_root(view)
        else:
            folder = tempfile.mkdtemp(prefix="lemma-appworld-")
        child_life, child_held = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(child_held)
            os.close(proc)
            confinement.die_with_parent(child_life)
            serve(connection, message, settings, view, folder)
        os.close(child_life)
        ends = [(connection.fileno(), select.POLLRDHUP), (life, select.POLLHUP)]
        confinement.await_end(child, ends, proc, folder, view)
    except BaseException as error:  # noqa: BLE001  (the other side is told why, and this process ends)
        fail(connection, error)
    if folder:
        confinement.remove(folder)
    os._exit(0)


def serve(
    connection: socket.socket, message: dict[str, Any], settings: dict[str, Any], view: confinement.View, folder: str
) -> None:
    """Confine this process for good, then play or judge. Never returns."""
    try:
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, 4096)
        os.environ["APPWORLD_ROOT"] = os.environ["HOME"] = confined(settings, view, folder)
        confinement.set_limits(
            confinement.Limits(**settings["limits"]), settings["mapped"], own_users=settings["sandbox"] == "namespaces"
        )
        missing = syscall_filter.install()
        if missing and settings["sandbox"] in ("namespaces", "landlock"):
            raise OSError(missing)
        if message["call"] == "judge":
            world_child.judge(connection, message)
        else:
            world_child.play(connection, message)
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001  (the other side is told why, and this process ends)
        fail(connection, error)
    os._exit(0)


def confined(settings: dict[str, Any], view: confinement.View, folder: str) -> str:
    """Give up powers, or take on Landlock's rules; the root of AppWorld as this process sees it."""
    if settings["sandbox"] == "namespaces":
        os.chdir(WORLD)
        confinement.drop_powers()
        return WORLD
    for path, place in view.read:
        if place.startswith(f"{WORLD}/"):
            shown = folder + place.removeprefix(WORLD)
            os.makedirs(os.path.dirname(shown), exist_ok=True)
            os.symlink(path, shown)
    os.chdir(folder)
    if settings["sandbox"] == "landlock":
        confinement.landlock([path for path, _ in view.read], folder)
        confinement.drop_powers()
    return folder


def view_of(root: str, task: str, *, with_gold: bool) -> confinement.View:
    """Python and one task; its gold for the judge alone."""
    if os.path.basename(task) != task or task in ("", ".", ".."):
        raise ValueError(f"'{task}' is no name of a task")
    data = os.path.join(os.path.realpath(root), "data")
    parts = ["base_dbs", "api_docs", f"tasks/{task}/specs.json", f"tasks/{task}/dbs"]
    parts += [f"tasks/{task}/ground_truth"] if with_gold else []
    # AppWorld's report of a failed test looks at the source of every function on the stack, this file's among them.
    own = os.path.dirname(os.path.abspath(__file__))
    read = [(path, path) for path in (*confinement.python_folders(), own)]
    read += [(os.path.join(data, part), f"{WORLD}/data/{part}") for part in parts]
    return confinement.View(tuple(read), f"{WORLD}/experiments")


def fail(connection: socket.socket, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(child_frames.pack({"error": f"{type(error).__name__}: {error}"}))


if __name__ == "__main__":
    main()
