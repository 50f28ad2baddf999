"""A filter of system calls for agent code: no new process or program, no signal to others, no socket, no
mount, no namespace, no tracing, no change of who may use a file, of its times, or of its length by its path.

It holds with or without namespaces, and nothing that runs under it can take it off.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
CLONE_THREAD = 0x00010000
# Numbers of calls from here on belong to another interface of the same x86 kernel.
X32 = 0x40000000

# The kernel's name of each architecture, its `clone`, and the numbers of the calls that are refused.
ARCHITECTURES = {
    "x86_64": (0xC000003E, 56, {
        "socket": 41, "connect": 42, "bind": 49, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "ptrace": 101,
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "kexec_load": 246,
        "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "userfaultfd": 323, "perf_event_open": 298,
        "add_key": 248, "request_key": 249, "keyctl": 250, "open_by_handle_at": 304, "prlimit64": 302,
        "setrlimit": 160, "init_module": 175, "finit_module": 313, "kill": 62, "tkill": 200, "tgkill": 234,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
        "truncate": 76,
    }),
    "aarch64": (0xC00000B7, 220, {
        "socket": 198, "connect": 203, "bind": 200, "execve": 221, "execveat": 281, "ptrace": 117, "mount": 40,
        "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "kexec_load": 104,
        "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "userfaultfd": 282, "perf_event_open": 241,
        "add_key": 217, "request_key": 218, "keyctl": 219, "open_by_handle_at": 265, "prlimit64": 261,
        "setrlimit": 164, "init_module": 105, "finit_module": 273, "kill": 129, "tkill": 130, "tgkill": 131,
        "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        "truncate": 45,
    }),
}  # fmt: skip
# Newer calls have the same number everywhere.
EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442, "pidfd_send_signal": 424,
}  # fmt: skip
CLONE3 = 435
# Calls that change who may use a file, or its times. They seem to succeed and do nothing: IPython makes them when it
# copies its own files, and no rule on paths keeps an agent from making them on files of others.
WITHOUT_EFFECT = {
    "x86_64": (90, 91, 92, 93, 94, 260, 268, 452, 132, 235, 261, 280, 188, 189, 190, 197, 198, 199, 463, 466, 469),
    "aarch64": (52, 53, 54, 55, 452, 88, 5, 6, 7, 14, 15, 16, 463, 466, 469),
}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install() -> str:
    """Put the filter in place for this process; what is missing, in words, where this machine has none."""
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return f"no filter of system calls is known for {platform.machine()}"
    code = program(*architecture, WITHOUT_EFFECT[platform.machine()])
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code)
    given = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given)
    ):
        return "the kernel takes no filter of system calls"
    return ""


def program(architecture: int, clone: int, refused: dict[str, int], without_effect: tuple[int, ...]) -> bytes:
    """The filter in the kernel's own small language (classic BPF)."""
    refuse = FAIL | errno.EPERM
    lines = [
        _load(4), _jump(architecture, 1, 0), _give(KILL),
        _load(0), _jump_from(X32, 0, 1), _give(refuse),
        # glibc falls back to clone, whose flags can be read here.
        _jump(CLONE3, 0, 1), _give(FAIL | errno.ENOSYS),
    ]  # fmt: skip
    for number in sorted({*refused.values(), *EVERYWHERE.values()}):
        lines += [_jump(number, 0, 1), _give(refuse)]
    for number in without_effect:
        lines += [_jump(number, 0, 1), _give(FAIL)]
    # Threads are allowed, processes are not.
    lines += [_jump(clone, 0, 3), _load(16), _jump_if_set(CLONE_THREAD, 1, 0), _give(refuse), _give(ALLOW)]
    return b"".join(lines)


def _line(code: int, yes: int, no: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _load(offset: int) -> bytes:
    return _line(0x20, 0, 0, offset)


def _jump(value: int, yes: int, no: int) -> bytes:
    return _line(0x15, yes, no, value)


def _jump_from(value: int, yes: int, no: int) -> bytes:
    return _line(0x35, yes, no, value)


def _jump_if_set(value: int, yes: int, no: int) -> bytes:
    return _line(0x45, yes, no, value)


def _give(value: int) -> bytes:
    return _line(0x06, 0, 0, value)
