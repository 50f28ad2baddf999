"""What runs inside a sandbox: a Python that executes programs written by a model. Standard library only.

    python -s -P -S -B sandbox_child.py SETTINGS     one JSON object per line on stdin, one per line on stdout

A supervisor, which never runs the model's code, waits for the end of the process that does, or of its input, which
means that the trainer is gone. The isolation: no network, no view of other processes and a private /tmp (namespaces, if
the machine allows them); no file but Python's own (Landlock); no new process, signal, socket or change of file
permissions (seccomp); limits on memory, CPU time, files and output. The first line of output says which of them hold.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from contextlib import suppress

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_PROCESSES, NEW_NET, NEW_MOUNTS, NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 2, 4, 8, 1 << 14
# What each version of Landlock can forbid for files and folders.
FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
MB = 1 << 20
BIND = 4096


def own_processes() -> bool:
    """New user and process namespaces: from now on, children see only their own processes, and may enter further
    namespaces."""
    uid, gid = os.getuid(), os.getgid()
    if not hasattr(LIBC, "unshare") or LIBC.unshare(NEW_USER | NEW_PROCESSES) != 0:
        return False
    with suppress(OSError):
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return True


def confine(settings: dict) -> dict[str, bool]:
    """Drop everything that a program does not need. Returns what could be isolated."""
    held = {"network": False, "files": False, "processes": False, "temporary": False}
    if hasattr(LIBC, "unshare") and LIBC.unshare(NEW_NET | NEW_MOUNTS | NEW_IPC) == 0:
        held["network"] = True
        held["temporary"] = own_temporary_folder(settings["files_mb"], settings["readable"])
    for name, value in limits(settings).items():
        if hasattr(resource, name):
            resource.setrlimit(getattr(resource, name), (value, value))
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        held["files"] = only_files_of(settings["readable"], ["/tmp"] if held["temporary"] else [])
        held["processes"] = no_processes()
        held["network"] = held["network"] or held["processes"]
    if held["temporary"]:
        os.chdir("/tmp")
    return held


def own_temporary_folder(megabytes: int, readable: list) -> bool:
    """A private /tmp, which disappears with the process."""
    private, recursive = 1 << 18, 1 << 14
    if LIBC.mount(b"none", b"/", None, private | recursive, None) != 0:
        return False
    hidden = [place for place in readable if place.startswith("/tmp/") and os.path.isdir(place)]
    held = [os.open(place, os.O_PATH) for place in hidden]
    if LIBC.mount(b"none", b"/tmp", b"tmpfs", 2 | 4, f"size={megabytes}m,nr_inodes=1000".encode()) != 0:
        return False
    for place, handle in zip(hidden, held, strict=True):  # a Python that is installed below /tmp is seen there
        os.makedirs(place, exist_ok=True)
        LIBC.mount(f"/proc/self/fd/{handle}".encode(), place.encode(), None, BIND | recursive, None)
        os.close(handle)
    with suppress(OSError):
        open("/tmp/probe", "w").close()
        os.remove("/tmp/probe")
        return True
    return False


def limits(settings: dict) -> dict[str, int]:
    return {
        "RLIMIT_AS": settings["memory_mb"] * MB,
        "RLIMIT_CPU": settings["processor_seconds"],
        "RLIMIT_FSIZE": settings["files_mb"] * MB,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }


def only_files_of(readable: list[str], writable: list[str]) -> bool:
    """With Landlock: only files below these folders can be opened."""
    version = LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    handled = FILES[min(version, 3)]
    more = [3] * ((version >= 4) + (version >= 6))
    wanted = struct.pack(f"{1 + len(more)}Q", handled, *more)
    ruleset = LIBC.syscall(LANDLOCK_CREATE, wanted, ctypes.c_size_t(len(wanted)), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    reading = READ_FILE | READ_DIR | EXECUTE
    rules = [(path, reading) for path in readable] + [(path, handled & ~EXECUTE) for path in writable]
    rules += [("/dev/null", READ_FILE | WRITE_FILE), ("/dev/urandom", READ_FILE)]
    for path, rights in rules:
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights & handled, folder)
        LIBC.syscall(LANDLOCK_ADD, ruleset, 1, rule, ctypes.c_uint32(0))
        os.close(folder)
    done = LIBC.syscall(LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0)) == 0
    os.close(ruleset)
    return done


# Numbers of system calls: of x86-64, and of the common table of newer machines such as arm64. They make processes,
# send signals, open connections, look into other processes or slow them down, change what a process is allowed, or
# change who may use a file, its times or its length by its path, which Landlock does not look at.
FORBIDDEN = {
    "x86_64": (
        57, 58, 59, 322, 62, 200, 234, 129, 297, 424, 434, 41, 42, 43, 49, 50, 53, 288, 101, 310, 311, 438, 272, 308,
        165, 166, 155, 161, 321, 298, 323, 425, 426, 427, 248, 249, 250, 303, 304, 428, 429, 430, 431, 432, 442, 175,
        313, 246, 320, 169, 172, 173, 153, 163, 157, 64, 29, 68, 240, 141, 142, 144, 203, 314, 251, 256, 279, 312, 440,
        448, 90, 91, 92, 93, 94, 260, 268, 452, 132, 235, 261, 280, 188, 189, 190, 197, 198, 199, 463, 466, 469, 76,
    ),
    "aarch64": (
        221, 281, 129, 130, 131, 138, 240, 424, 434, 198, 200, 201, 202, 203, 199, 242, 117, 270, 271, 438, 97,
        268, 40, 39, 41, 51, 280, 241, 282, 425, 426, 427, 217, 218, 219, 264, 265, 428, 429, 430, 431, 432, 442, 105,
        273, 104, 294, 142, 58, 89, 190, 194, 186, 180, 167, 140, 118, 119, 122, 274, 30, 238, 239, 272, 440, 448,
        52, 53, 54, 55, 452, 88, 5, 6, 7, 14, 15, 16, 463, 466, 469, 45,
    ),
}  # fmt: skip
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE, CLONE3, LIMITS = {"x86_64": 56, "aarch64": 220}, 435, {"x86_64": 302, "aarch64": 261}
FCNTL, SET_OWNER, SET_SIGNAL, SET_OWNER_EX = {"x86_64": 72, "aarch64": 25}, 8, 10, 15
THREAD = 0x00010000
LOAD, EQUALS, SET_BITS, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, REFUSE, ABSENT, KILL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000


def no_processes() -> bool:
    """With seccomp: threads are allowed, but no new process, signal or connection."""
    machine = platform.machine()
    if machine not in FORBIDDEN:
        return False
    lines = [(LOAD, 0, 0, 4), (EQUALS, 1, 0, ARCHITECTURE[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == "x86_64":  # the second numbering of the same processor
        lines += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    for number in FORBIDDEN[machine]:
        lines += [(EQUALS, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    # The arguments of clone3 cannot be inspected: without it, threads are created with clone.
    lines += [(EQUALS, 0, 1, CLONE3), (RETURN, 0, 0, ABSENT)]
    # Limits of this process only, which is number 0.
    lines += [(EQUALS, 0, 4, LIMITS[machine]), (LOAD, 0, 0, 16), (EQUALS, 0, 1, 0), (RETURN, 0, 0, ALLOW)]
    lines += [(RETURN, 0, 0, REFUSE)]
    # No file may be set to signal another process.
    lines += [(EQUALS, 0, 6, FCNTL[machine]), (LOAD, 0, 0, 24), (EQUALS, 2, 0, SET_OWNER), (EQUALS, 1, 0, SET_SIGNAL)]
    lines += [(EQUALS, 0, 1, SET_OWNER_EX), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    lines += [(EQUALS, 0, 3, CLONE[machine]), (LOAD, 0, 0, 16), (SET_BITS, 1, 0, THREAD), (RETURN, 0, 0, REFUSE)]
    lines += [(RETURN, 0, 0, ALLOW)]
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(buffer))
    return LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(head), 0, 0) == 0


class Output:
    """Keeps the beginning and the end of the output, up to a number of characters."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, most: int):
        self.most, self.begin, self.end, self.length = most, "", "", 0

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        written = len(text)
        self.length += written
        room = self.most - self.most // 2 - len(self.begin)
        if room > 0:
            self.begin, text = self.begin + text[:room], text[room:]
        half = self.most // 2
        self.end = (self.end + text[-half:])[-half:] if half else ""
        return written

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def text(self) -> str:
        gone = self.length - len(self.begin) - len(self.end)
        return self.begin + (f"\n[... {gone} characters left out ...]\n" if gone else "") + self.end


def run(code: str, names: dict, most: int) -> str:
    """The program's output; the value of a last expression is printed too, and so is an error."""
    import ast
    import traceback

    output = Output(most)
    sys.stdout = sys.stderr = output
    try:
        tree = ast.parse(code, "<program>")
        end = tree.body[-1] if tree.body else None
        last = end if isinstance(end, ast.Expr) else None
        tree.body = tree.body[:-1] if last is not None else tree.body
        exec(compile(tree, "<program>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
            if value is not None:
                output.write(repr(value) + "\n")
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001  (whatever a program does is answered)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<program>"]
        where = f" (line {lines[-1]})" if lines else ""
        output.write("".join(traceback.format_exception_only(error)).strip() + where + "\n")
    return output.text()


def serve(settings: dict) -> None:
    """Run programs one at a time, in one namespace."""
    orders, answers = os.fdopen(os.dup(0), "rb", closefd=True), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    held = confine(settings)
    names: dict = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.path += settings["packages"]
    import random

    random.seed(settings["seed"])
    send(answers, {"held": held})
    for line in orders:
        said = run(json.loads(line)["code"], names, settings["output"])
        send(answers, {"output": said.encode("utf-8", "backslashreplace").decode("utf-8")})


def send(file: int, message: dict) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(file, data) :]


def supervise(child: int) -> None:
    """Wait until the child ends, or until the trainer has closed the input."""
    waiting = select.poll()
    waiting.register(0, 0)
    waiting.register(os.pidfd_open(child), select.POLLIN)
    os.close(1)
    waiting.poll()
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    own_processes()
    child = os.fork()
    if child:
        supervise(child)
        return
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        serve(settings)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
