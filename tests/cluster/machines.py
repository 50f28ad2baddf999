"""Two machines on this one: namespaces with a network, a host name and mounts of their own, joined by a cable that can
be cut. A folder can be hidden from a machine; all others are shared, as over a network file system.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.cluster.forked import lemma_rank
from tests.preloaded import CONTEXT

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("alpha", "beta")
PORT = "29500"
# An interface of each machine that leads nowhere, as the bridge of its containers.
BRIDGE = "172.17.0.1/16"
NAMESPACES = ("net", "uts", "mnt")
FLAGS = ["--net", "--uts", "--mount"]
# What Debian writes: the host's own name stands for its loopback.
HOSTS = tuple(
    f"127.0.0.1 localhost\n127.0.1.1 {own}\n{address} {other}\n"
    for own, other, address in zip(NAMES, reversed(NAMES), reversed(ADDRESSES), strict=True)
)


def missing() -> str | None:
    """Why there can be no machines here."""
    lacking = [tool for tool in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(tool) is None]
    if lacking:
        return f"{lacking[0]} is not installed"
    script = "mount -t tmpfs none /mnt && ip link add cable type veth peer name other"
    tried = subprocess.run(["unshare", *FLAGS, "sh", "-c", script], capture_output=True, text=True)
    return tried.stderr.strip() or "unshare is refused" if tried.returncode else None


class Machine:
    """Processes with a network, a host name and mounts of their own."""

    def __init__(self, name: str, hosts: str):
        self.name = name
        self._ranks: list[BaseProcess] = []
        self._keeper = subprocess.Popen(["unshare", *FLAGS, "sleep", "infinity"])
        self.pid = self._keeper.pid
        until = time.monotonic() + 10
        while Path(f"/proc/{self.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < until, "a machine does not start"
            time.sleep(0.01)
        self.do("hostname", name)
        self.do("ip", "link", "set", "lo", "up")
        self._replace(Path("/etc/hosts"), hosts)
        if Path("/etc/resolv.conf").exists():
            self._replace(Path("/etc/resolv.conf"), "nameserver 127.0.0.1\n")

    def command(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self.pid), *FLAGS, "--wd=.", *words]

    def do(self, *words: str) -> str:
        done = subprocess.run(self.command(words), capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def _replace(self, path: Path, text: str) -> None:
        """Give a file another content on this machine alone."""
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(text)
            file.flush()
            self.do("mount", "--bind", file.name, str(path))

    def hide(self, folder: Path) -> None:
        """Give this machine a folder of its own, empty, in the place of a shared one."""
        self.do("mount", "-t", "tmpfs", "none", str(folder))

    def lemma(self, words: Sequence[str], output: Path, env: Mapping[str, str]) -> BaseProcess:
        """Run a command of Lemma here, forked from a process that has everything imported."""
        output.unlink(missing_ok=True)
        process = CONTEXT.Process(target=_live, args=(self.pid, list(words), output, dict(env)))
        process.start()
        self._ranks.append(process)
        return process

    def kill(self) -> None:
        """Every rank of it at once, as when the power goes."""
        for process in self._ranks:
            process.kill()
            process.join()
        self._ranks = []

    def close(self) -> None:
        self.kill()
        self._keeper.kill()
        self._keeper.wait()


class Pair:
    """Two machines and the cable between them."""

    def __init__(self, hosts: Sequence[str] = HOSTS):
        self.machines = [Machine(name, text) for name, text in zip(NAMES, hosts, strict=True)]
        first, second = self.machines
        inside = ["nsenter", "--target", str(first.pid), "--net"]
        cable = ["ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second.pid)]
        subprocess.run([*inside, *cable], check=True)
        for machine, address in zip(self.machines, ADDRESSES, strict=True):
            machine.do("ip", "link", "add", "bridge", "type", "veth", "peer", "name", "guest")
            for name, own in (("bridge", BRIDGE), ("cable", f"{address}/24")):
                machine.do("ip", "address", "add", own, "dev", name)
                machine.do("ip", "link", "set", name, "up")

    def cut(self) -> None:
        """Packets vanish from now on, and nobody is told."""
        self.machines[1].do("ip", "link", "set", "cable", "down")

    def mend(self) -> None:
        self.machines[1].do("ip", "link", "set", "cable", "up")

    def close(self) -> None:
        for machine in self.machines:
            machine.close()


def _live(machine: int, words: list[str], output: Path, env: dict[str, str]) -> None:
    libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
    handles = [os.open(f"/proc/{machine}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for name, handle in zip(NAMESPACES, handles, strict=True):
        assert libc.setns(handle, 0) == 0, (name, os.strerror(ctypes.get_errno()))
        os.close(handle)
    os.chdir(folder)
    lemma_rank(words, env, output)
