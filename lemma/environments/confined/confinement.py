"""Confines a process: a few folders read-only, one to write in, no network, and no other process.

Namespaces give it its own root, in memory. If a machine does not allow them, the kernel's Landlock rules restrict it to
the same folders. `syscall_filter` comes on top of either.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import stat
import struct
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_READ_ONLY, MOUNT_NO_SUID = 1, 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
SYS_MOUNT_SETATTR, SYS_LANDLOCK = 442, 444
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SIGKILL = 9
# Threads of one world, which no limit counts where it belongs to root, and how often it is looked at.
THREADS, LOOK_MS = 64, 250

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """Limits of one world: memory beyond what it starts with, CPU time, size of its files."""

    memory_mb: int = 1024
    cpu_seconds: int = 600
    file_mb: int = 256


@dataclass(frozen=True)
class View:
    """What a process sees of the disk: `read` are pairs of a path on this machine and one below the new root."""

    read: tuple[tuple[str, str], ...]
    write: str
    megabytes: int = 256
    files: int = 20_000


def strongest(wanted: str) -> tuple[str, str]:
    """The wanted confinement, or of `auto` the strongest that this machine allows, tried in a child; empty where there
    is none. And what is missing, in words."""
    if wanted == "none":
        return "none", ""
    missing: list[str] = []
    for kind in ("namespaces", "landlock") if wanted == "auto" else (wanted,):
        why = _tried(kind)
        if not why:
            return kind, "; ".join(missing)
        missing.append(why)
    return "", "; ".join(missing)


def _tried(kind: str) -> str:
    """Why a child cannot be confined so; empty where it can."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            if kind == "namespaces":
                enter_namespaces()
                enter_root(View((), "/tmp"))
            else:
                landlock([], "/tmp")
            os.write(writing, b"ok")
        except (OSError, KeyError) as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 4096).decode()
    os.close(reading)
    os.wait()
    return "" if said == "ok" else f"{kind}: {said or 'failed'}"


def python_folders() -> list[str]:
    """Folders that a running Python may load from: its library, its packages and the system's shared objects."""
    paths = sysconfig.get_paths()
    own = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    system = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"}
    return outermost(os.path.realpath(path) for path in own | system if os.path.isdir(path))


def outermost(folders: Iterable[str]) -> list[str]:
    """Without those inside of another, which are there already: Python's own library may be below /usr/lib."""
    there = sorted(set(folders))
    return [path for path in there if not any(path.startswith(f"{other}/") for other in there)]


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def die_with_parent(life: int) -> None:
    """End when the parent ends, also where it ended before this line: it alone holds the other end of `life`."""
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if select.select([life], [], [], 0)[0]:
        os._exit(0)


def mapped_bytes() -> int:
    """Address space that this process has mapped."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def enter_namespaces() -> None:
    """Users, mounts, network, processes and names of this process's own; the next child is the first process in it."""
    user, group = os.getuid(), os.getgid()
    kinds = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    check(libc.unshare(kinds), "unshare")
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)


def enter_root(view: View) -> None:
    """Make a root in memory with the folders of a view, and unmount the machine's own."""
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
    sources = [(os.open(path, os.O_PATH), place) for path, place in view.read]
    root = b"/tmp"
    size = f"size={view.megabytes}m,nr_inodes={view.files},mode=700".encode()
    check(libc.mount(b"lemma", root, b"tmpfs", MS_NOSUID | MS_NODEV, size), "a file system in memory")
    for descriptor, place in sources:
        _bind(descriptor, f"/tmp{place}")
        os.close(descriptor)
    os.makedirs("/tmp/dev", exist_ok=True)
    for device in ("null", "zero", "urandom", "random"):
        with open(f"/tmp/dev/{device}", "w"):
            pass
        check(libc.mount(f"/dev/{device}".encode(), f"/tmp/dev/{device}".encode(), None, MS_BIND, None), "devices")
    for folder in (view.write, "/tmp", "/old"):
        os.makedirs(f"/tmp{folder}", exist_ok=True)
    for link in ("lib", "lib64"):
        if os.path.islink(f"/{link}") and not os.path.lexists(f"/tmp/{link}"):
            os.symlink(os.readlink(f"/{link}"), f"/tmp/{link}")
    os.chdir("/tmp")
    check(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "leave the old root")
    os.rmdir("/old")


def _bind(source: int, target: str) -> None:
    """Bind-mount a file or folder read-only, with all that is mounted below it."""
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    check(libc.mount(f"/proc/self/fd/{source}".encode(), target.encode(), None, MS_BIND | MS_REC, None), "bind")
    attributes = struct.pack("=QQQQ", MOUNT_READ_ONLY | MOUNT_NO_SUID, 0, 0, 0)
    given = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, len(attributes))
    check(given, "read-only")


def drop_powers() -> None:
    """Drop all capabilities, for this process and everything it could start."""
    for number in range(64):
        if libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0):
            break
    header = struct.pack("=Ii", 0x20080522, 0)
    check(libc.capset(header, bytes(24)), "capset")


def set_limits(limits: Limits, mapped: int, *, own_users: bool) -> None:
    """Hard limits; memory counts on top of what was mapped before. Processes are counted in a user namespace only:
    elsewhere all that the user runs on this machine would count."""
    values = {
        resource.RLIMIT_AS: mapped + limits.memory_mb * 2**20,
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_FSIZE: limits.file_mb * 2**20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 512,
    }
    if own_users:
        values[resource.RLIMIT_NPROC] = 64
    for kind, wanted in values.items():
        _, most = resource.getrlimit(kind)
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(kind, (value, value))


def await_end(child: int, others: list[tuple[int, int]], proc: int, folder: str, most: View) -> None:
    """Kill a child when it is too large, or when one of `others` (a descriptor and what to wait for) has an event, and
    wait for its end. `proc` is `/proc`, opened before the child changed its root; `folder` is where it writes if no
    file system of its own bounds that."""
    poll = select.poll()
    for descriptor, event in [(os.pidfd_open(child), select.POLLIN), *others]:
        poll.register(descriptor, event)
    while not poll.poll(LOOK_MS):
        if _threads(proc, child) > THREADS or (folder and _fills(child, folder, most)):
            break
    with suppress(ProcessLookupError):
        os.kill(child, SIGKILL)
    os.waitpid(child, 0)


def remove(folder: str) -> None:
    """Become programs that remove a folder of any depth, and what may not be read in it."""
    os.execv("/bin/sh", ["sh", "-c", 'chmod -R u+rwx -- "$0"; rm -rf -- "$0"', folder])


def _threads(proc: int, process: int) -> int:
    with open(os.open(f"{process}/stat", os.O_RDONLY, dir_fd=proc)) as file:
        return int(file.read().rpartition(")")[2].split()[17])


def _fills(process: int, folder: str, most: View) -> bool:
    """Whether a folder, with the files that a process has removed from it and still holds open, is beyond a limit or
    cannot be looked at."""
    blocks, files = most.megabytes * 2048, most.files

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    try:
        for _, folders, names, place in os.fwalk(folder, onerror=fail):
            files -= len(folders) + len(names)
            if files < 0:
                return True
            for name in names:
                with suppress(FileNotFoundError):
                    blocks -= os.stat(name, dir_fd=place, follow_symlinks=False).st_blocks
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(FileNotFoundError):
                held = os.stat(f"/proc/{process}/fd/{descriptor}")
                blocks -= held.st_blocks if stat.S_ISREG(held.st_mode) and held.st_nlink == 0 else 0
    except (OSError, RecursionError):
        return True
    return blocks < 0


# --- where namespaces are not allowed -------------------------------------------------------------------------------

WRITE_FILE, READ_FILE, READ_FOLDER, REMOVE_FOLDER, REMOVE_FILE = 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5
MAKE_FOLDER, MAKE_FILE, REFER, TRUNCATE = 1 << 7, 1 << 8, 1 << 13, 1 << 14
# What each version of Landlock can refuse for files and folders; version 4 knows ports, 6 knows signals and sockets.
FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}


def landlock(read: list[str], write: str) -> None:
    """Keep this process to reading these files and folders and to writing in one; OSError where the kernel cannot."""
    version = libc.syscall(SYS_LANDLOCK, None, ctypes.c_size_t(0), 1)
    handled = FILES[min(max(version, 1), 3)]
    wanted = [handled] + [3] * ((version >= 4) + (version >= 6))
    given = struct.pack(f"={len(wanted)}Q", *wanted)
    rules = libc.syscall(SYS_LANDLOCK, given, ctypes.c_size_t(len(given)), 0)
    if version < 1 or rules < 0:
        raise OSError(ctypes.get_errno(), "Landlock is not there")
    for path in read:
        _allow(rules, path, READ_FILE | (READ_FOLDER if os.path.isdir(path) else 0))
    for device in ("zero", "urandom", "random"):
        _allow(rules, f"/dev/{device}", READ_FILE)
    _allow(rules, "/dev/null", READ_FILE | WRITE_FILE)
    own = (
        WRITE_FILE | READ_FILE | READ_FOLDER | REMOVE_FOLDER | REMOVE_FILE | MAKE_FOLDER | MAKE_FILE | REFER | TRUNCATE
    )
    _allow(rules, write, own & handled)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    check(libc.syscall(SYS_LANDLOCK + 2, rules, 0), "Landlock")
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH)
    rule = struct.pack("=Qi", access, descriptor)
    check(libc.syscall(SYS_LANDLOCK + 1, rules, 1, rule, 0), f"Landlock for {path}")
    os.close(descriptor)
