"""A filter of system calls for programs and agents of a model: no new process or program, no signal to others, no
connection, no mount, no namespace, no tracing, no slowing down of others, no memory or queue that others share or that
no limit counts, no change of who may use a file, of its times or flags, or of its length without opening it to write,
no lock on it.

It holds with or without namespaces, and nothing that runs under it can take it off.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Mapping

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
REFUSE, NO_TERMINAL = FAIL | errno.EPERM, FAIL | errno.ENOTTY
CLONE_THREAD = 0x00010000
# Numbers of calls from here on belong to another interface of the same x86 kernel.
X32 = 0x40000000
# Where the lower half of an argument lies.
FIRST, SECOND, THIRD = 16, 24, 32

# The kernel's name of each architecture.
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Calls that are allowed with some arguments only.
CLONE, FCNTL, PRLIMIT = {"x86_64": 56, "aarch64": 220}, {"x86_64": 72, "aarch64": 25}, {"x86_64": 302, "aarch64": 261}
IOCTL, SOCKETPAIR = {"x86_64": 16, "aarch64": 29}, {"x86_64": 53, "aarch64": 199}
# `open` and `openat`, each with where it says how the file is opened.
OPENS = {"x86_64": {2: SECOND, 257: THIRD}, "aarch64": {56: THIRD}}
# Calls whose arguments cannot be read here; others do the same, and libraries fall back to them.
CLONE3, OPENAT2 = 435, 437
# A file that is opened without leave to write can be emptied all the same, and Landlock before version 3 lets it be.
EMPTIES, HOW_IT_OPENS = 0o1000, 0o3
# What `fcntl` must not do: have a file signal another process, make others wait for it, watch a folder, or hold more
# in a pipe. Locks on parts of a file seem to succeed and do nothing.
FILE_COMMANDS = {"SETOWN": 8, "SETSIG": 10, "SETOWN_EX": 15, "SETLEASE": 1024, "NOTIFY": 1026, "SETPIPE_SZ": 1031}
FILE_LOCKS = {"SETLK": 6, "SETLKW": 7, "OFD_SETLK": 37, "OFD_SETLKW": 38}
# All that `ioctl` may do: ask about a terminal, count what can be read, and set how a descriptor waits and is passed
# on. Others change files that were opened for reading alone.
DEVICE_COMMANDS = {"TCGETS": 0x5401, "TIOCGWINSZ": 0x5413, "FIONREAD": 0x541B, "FIONBIO": 0x5421, "FIONCLEX": 0x5450,
                   "FIOCLEX": 0x5451}  # fmt: skip
# The one kind of pair of sockets that sends to no other address.
STREAM, KIND_OF_SOCKET = 1, 0xF

# Calls that are refused, with their numbers on x86_64 and on aarch64, which lacks some.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200),
    "listen": (50, 201), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "syslog": (103, 116),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "truncate": (76, 45),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "iopl": (172, None), "ioperm": (173, None),
    "vhangup": (153, 58), "acct": (163, 89), "prctl": (157, 167),
    "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
# Calls that change who may use a file, or its times, lock it, or write out what others wrote. They seem to succeed and
# do nothing: libraries make them for files of their own, and no rule on paths keeps a program from making them on files
# of others.
WITHOUT_EFFECT: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "file_setattr": (469, 469), "flock": (73, 32), "sync": (162, 81), "syncfs": (306, 267),
}  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install() -> str:
    """Put the filter in place for this process; what is missing, in words, where this machine has none."""
    machine = platform.machine()
    if machine not in AUDIT:
        return f"no filter of system calls is known for {machine}"
    code = program(machine)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code)
    given = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given)
    ):
        return "the kernel takes no filter of system calls"
    return ""


def numbers(calls: dict[str, tuple[int | None, int | None]], machine: str) -> list[int]:
    known = (pair[machine == "aarch64"] for pair in calls.values())
    return sorted(number for number in known if number is not None)


def program(machine: str) -> bytes:
    """The filter in the kernel's own small language (classic BPF)."""
    lines = [
        _load(4), _jump(AUDIT[machine], 1, 0), _give(KILL),
        _load(0), _jump_from(X32, 0, 1), _give(REFUSE),
        _jump(CLONE3, 1, 0), _jump(OPENAT2, 0, 1), _give(FAIL | errno.ENOSYS),
    ]  # fmt: skip
    for number in numbers(REFUSED, machine):
        lines += [_jump(number, 0, 1), _give(REFUSE)]
    for number in numbers(WITHOUT_EFFECT, machine):
        lines += [_jump(number, 0, 1), _give(FAIL)]
    # Limits of this process only, which is number 0.
    lines += _by_argument(PRLIMIT[machine], FIRST, {0: ALLOW}, REFUSE)
    file_commands = dict.fromkeys(FILE_COMMANDS.values(), REFUSE) | dict.fromkeys(FILE_LOCKS.values(), FAIL)
    lines += _by_argument(FCNTL[machine], SECOND, file_commands, ALLOW)
    lines += _by_argument(IOCTL[machine], SECOND, dict.fromkeys(DEVICE_COMMANDS.values(), ALLOW), NO_TERMINAL)
    lines += _by_argument(SOCKETPAIR[machine], SECOND, {STREAM: ALLOW}, REFUSE, bits=KIND_OF_SOCKET)
    without_leave = dict.fromkeys((EMPTIES, EMPTIES | HOW_IT_OPENS), REFUSE)
    for number, place in OPENS[machine].items():
        lines += _by_argument(number, place, without_leave, ALLOW, bits=EMPTIES | HOW_IT_OPENS)
    # Threads are allowed, processes are not.
    lines += [_jump(CLONE[machine], 0, 3), _load(FIRST), _jump_if_set(CLONE_THREAD, 1, 0), _give(REFUSE), _give(ALLOW)]
    return b"".join(lines)


def _by_argument(number: int, place: int, known: Mapping[int, int], other: int, bits: int | None = None) -> list[bytes]:
    """What a call gets by one of its arguments, or by some bits of it."""
    lines = [_load(place)] + ([_line(0x54, 0, 0, bits)] if bits is not None else [])
    for value, given in known.items():
        lines += [_jump(value, 0, 1), _give(given)]
    lines += [_give(other)]
    return [_jump(number, 0, len(lines)), *lines]


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
