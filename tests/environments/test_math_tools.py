"""A calculator and Python between turns: exact, harmless whatever a program does, and answered in words."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lemma.children.child_frames import pack, unpack
from lemma.core.errors import UserError
from lemma.core.types import Message, Outcome, Problem
from lemma.engines.protocol import Request, Sampling
from lemma.environments import Action, Observation
from lemma.environments.calculator import calculator
from lemma.environments.env_server import EnvAnswer, EnvOrder, Opening, answer_from, order_from
from lemma.environments.openings import opened_all
from lemma.environments.python_tool import PythonTools
from lemma.environments.sandbox import Sandbox, SandboxLimits
from lemma.environments.tools import understanding
from lemma.formats import make_format
from lemma.formats.bridge import Bridge
from lemma.formats.encode import encode_prompt
from lemma.formats.tool_prompt import ToolSpeech
from lemma.models.tiny import tiny_tokenizer
from lemma.rewards import make_reward
from lemma.rollouts import SampleRequest, Scorer, World, play
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from tests.cluster.forked import wait_for
from tests.rollouts.scripted import Scripted

SECRET = "the-gold-is-42"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 + 4 * 5", "23"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 = 0.333333333333"),
        ("2^100", str(2**100)),
        ("7 // 2 + 7 % 4", "6"),
        ("sqrt(16) + 2 ** 0.5", "5.41421356237"),
        ("(6 × 7 − 2) ÷ 8", "5"),
        ("factorial(20) / 10 ** 3", "2432902008176640"),
        ("1 / 0", "error: division by zero"),
        ("9 ** 9 ** 9", "error: the power is too large"),
        ("factorial(10 ** 9)", "error: factorial takes whole numbers up to 1000"),
        ("__import__('os').system('id')", "error: '__import__('os').system('id')' is no arithmetic"),
        ("(1).__class__", "error: '1 .__class__' is no arithmetic"),
        ("'a' * 10 ** 9", "error: ''a'' is no arithmetic"),
        ("(" * 400, "error: this is not an arithmetic expression"),
        ("1" * 2000, "error: the expression is longer than 1000 characters"),
        ("(-8) ** 0.3", "error: the result is not a real number"),
        ("1e400", "error: this has no value, or one that is too large"),
    ],
)
def test_the_calculator(expression: str, result: str) -> None:
    assert calculator(expression).startswith(result)


@given(st.integers(-99, 99), st.integers(-99, 99), st.integers(1, 99), st.sampled_from("+-*"))
def test_the_calculator_is_exact(a: int, b: int, c: int, sign: str) -> None:
    assert Fraction(calculator(f"({a} {sign} {b}) / {c}").split(" ")[0]) == Fraction(eval(f"{a} {sign} {b}"), c)


@given(st.text(alphabet="0123456789+-*/%().^ esqrtpi,", max_size=30))
def test_nothing_that_is_typed_breaks_the_calculator(expression: str) -> None:
    assert isinstance(calculator(expression), str)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer") / "gold.txt"
    path.write_text(SECRET)
    return path


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(SandboxLimits(seconds=20, memory_mb=256, output=2000))
    yield box
    box.close()


def test_programs_see_each_others_variables_and_print_what_they_find(sandbox: Sandbox) -> None:
    assert sandbox.run("x = 20\nprint('so')\nx + 1") == "so\n21\n"
    assert sandbox.run("x * 2") == "40\n"
    assert sandbox.run("1 / 0") == "ZeroDivisionError: division by zero (line 1)\n"
    assert "SyntaxError" in sandbox.run("x =")
    assert sandbox.run("import random; random.random()") == "0.8444218515250481\n"
    assert sandbox.run("import sys; sys.exit(3)") == ""
    assert sandbox.run("input()") == "EOFError: EOF when reading a line (line 1)\n"
    assert sandbox.run("import sympy; sympy.factorint(60)") == "{2: 2, 3: 1, 5: 1}\n"


FULL = "ended its interpreter|No space left"
HOSTILE: dict[str, tuple[str, str]] = {
    "reads a host file": ("open('/etc/passwd').read()", "Error: "),
    "reads the trainer's file": ("open(SECRET).read()", "Error: "),
    "reads it through a link": ("import os; os.symlink(SECRET, 'a'); open('a').read()", "Error: "),
    "reads what trains": ("open(SOURCE).read()", "Error: [Errno"),
    "lists the trainer's folder": ("import os; os.listdir(os.path.dirname(SECRET))", "Error: "),
    "writes beside it": ("open(SECRET + '2', 'w')", "Error: "),
    "looks at processes": ("open('/proc/1/environ').read()", "Error: "),
    "opens a socket": ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", "PermissionError"),
    "forks": ("import os\nwhile True: os.fork()", "PermissionError"),
    "starts a program": ("import subprocess; subprocess.run(['/bin/sh', '-c', 'id'])", "PermissionError"),
    "kills its parent": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "kills the trainer": ("import os; os.kill(TRAINER, 9)", "PermissionError"),
    "limits the trainer": ("import resource as r; r.prlimit(TRAINER, r.RLIMIT_CPU, (1, 1))", "PermissionError"),
    "signals the trainer by a file": (
        "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, TRAINER)", "PermissionError"),
    "signals the trainer by a socket": (
        "import fcntl, socket, struct; a, b = socket.socketpair(); fcntl.ioctl(a, 0x8901, struct.pack('i', TRAINER))",
        "OSError: [Errno 25]"),
    "sends to a socket of the machine": (
        "import socket as s; a, b = s.socketpair(s.AF_UNIX, s.SOCK_DGRAM); a.sendto(b'x', '/dev/log')",
        "PermissionError"),
    "passes a file through a socket": (
        "import socket as s; a, b = s.socketpair(); s.send_fds(a, [b'x'], [0])", "PermissionError"),
    "makes a file unchangeable": (
        "import fcntl, os, struct; fcntl.ioctl(os.open(MINE, 0), 0x40086602, struct.pack('l', 16))", "[Errno 25]"),
    "makes others wait for a file": (
        "import fcntl, os; fcntl.fcntl(os.open(MINE, 0), 1024, 1)", "PermissionError"),
    "locks a file": ("import fcntl, os; fcntl.flock(os.open(MINE, 0), fcntl.LOCK_EX)", ""),
    "locks a part of one": ("import fcntl, os; fcntl.lockf(os.open(MINE, 0), fcntl.LOCK_SH)", ""),
    "reads memory that others share": ("import ctypes; ctypes.CDLL(None).shmat(MEMORY, None, 0)", "-1"),
    "removes it": ("import ctypes; ctypes.CDLL(None).shmctl(MEMORY, 0, None)", "-1"),
    "watches a folder": (
        "import ctypes; c = ctypes.CDLL(None); c.inotify_add_watch(c.inotify_init(), b'/tmp', 256)", "-1"),
    "reads the kernel's log": (
        "import ctypes; ctypes.CDLL(None).klogctl(3, ctypes.create_string_buffer(99), 99)", "-1"),
    "becomes another user": ("import os; os.setgid(1), os.setuid(1)", "Error: "),
    "keeps memory in a file": ("import os; os.memfd_create('x')", "PermissionError"),
    "keeps it in pipes": ("import fcntl, os; fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)", "PermissionError"),
    "lets everybody write": ("import os; os.chmod(MINE, 0o777)", ""),
    "lets them by a handle": ("import os; os.fchmod(os.open(MINE, 0), 0o777)", ""),
    "gives a file away": ("import os; os.chown(MINE, 1, 1)", ""),
    "makes a file new": ("import os; os.utime(MINE, ns=(1, 1))", ""),
    "leaves what Python starts with": ("open(MINE.replace('mine.py', 'a.pth'), 'w')", "Error: "),
    "replaces a package": ("import os; open('a', 'w'); os.replace('a', MINE)", "Error: "),
    "removes one": ("import os; os.remove(MINE)", "Error: "),
    "writes into one": ("open(MINE, 'a')", "Error: "),
    # What the filter alone refuses: Landlock of Linux 6.1 and before does not.
    "empties one that it may read": ("import os; os.open(MINE, os.O_RDONLY | os.O_TRUNC)", "[Errno 1]"),
    "and by another mode": ("import os; os.open(MINE, 3 | os.O_TRUNC)", "[Errno 1]"),
    "and by a call that no filter can read": (
        "import ctypes, struct; c = ctypes.CDLL(None, use_errno=True)\n"
        "c.syscall(437, -100, MINE.encode(), struct.pack('QQQ', 0o1000, 0, 0), 24), ctypes.get_errno()", "(-1, 38)"),
    "writes beside its folder": ("try: open('/tmp/lemma-was-here', 'w')\nexcept OSError: pass", ""),
    "takes 2 GB": ("x = bytearray(2 << 30)", "MemoryError"),
    "writes many files": (
        "import time\nfor i in range(9): open(f'{i}', 'wb').write(bytes(8 << 20))\ntime.sleep(2)", FULL),
    "writes files that it removes": (
        "import os, time\nheld = []\nfor i in range(9):\n held += [open('b', 'wb')]; held[-1].write(bytes(8 << 20))\n"
        " os.remove('b')\ntime.sleep(2)", FULL),
    "makes folders in folders": (
        "import os, time\nfor i in range(1100):\n os.mkdir('d'); os.chdir('d')\ntime.sleep(2)", FULL),
    "starts threads without end": (
        "import _thread as t, threading, time\nthreading.stack_size(32768); lock = t.allocate_lock(); lock.acquire()\n"
        "for i in range(200): t.start_new_thread(lock.acquire, ())\ntime.sleep(2)", "ended its interpreter"),
    "writes 1 GB to disk": ("open('a', 'wb').write(bytes(64 << 20)); open('b', 'wb').write(bytes(64 << 20))", "Error"),
    "raises what nobody catches": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "recurses": ("def f(): return f()\nf()", "RecursionError"),
    "prints a huge number": ("print(10 ** 100000)", "ValueError"),
    "calls the kernel itself": (
        "import ctypes; ctypes.CDLL(None, use_errno=True).syscall(57), ctypes.get_errno()", "(-1, "),
    "breaks the interpreter": ("import ctypes; ctypes.string_at(0)", "ended its interpreter"),
    "leaves": ("import os; os._exit(0)", "ended its interpreter"),
    "answers with what is deep": (
        "import os\nfor f in range(64):\n try: os.write(f, b'\\0\\1\\0\\0' + b'[' * 65536)\n except OSError: pass",
        "ended its"),
    "answers for it": (
        "import os\nfor f in range(64):\n try: os.write(f, b'{}\\n')\n except OSError: pass", "ended its"),
}  # fmt: skip


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages that lie below the folder for temporary files, as those of many a virtual environment do."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "mine.py").write_text("VALUE = 42\n")
    monkeypatch.setattr("lemma.environments.sandbox.sysconfig.get_path", lambda name: str(folder))
    return folder


@pytest.mark.parametrize("confined", ["namespaces", "landlock"])
def test_hostile_programs_are_answered_and_reach_nothing(
    confined: str, sandbox: Sandbox, secret: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Landlock, as on a machine that allows no namespaces, too."""
    monkeypatch.setattr(Sandbox, "confine", confined)
    mine, libc = packages / "mine.py", ctypes.CDLL(None)
    memory = libc.shmget(0, 4096, 0o600)
    before = [(path.name, path.stat().st_mode, path.stat().st_mtime_ns) for path in (packages, mine)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        names = (str(secret), str(mine), __file__, server.getsockname()[1], os.getpid(), memory)
        front = f"SECRET, MINE, SOURCE, PORT, TRAINER, MEMORY = {names!r}\n"
        for name, (code, words) in HOSTILE.items():
            output = sandbox.run(front + code)
            assert any(word in output for word in words.split("|")) and SECRET not in output, f"{name}: {output}"
            assert sandbox.run("import mine; mine.VALUE") == "42\n", name
            with mine.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert libc.shmctl(memory, 0, None) == 0, "it is removed here"
    wait_for(lambda: not list(Path("/tmp").glob("lemma-python-*/d")))  # folders of any depth are removed
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]
    assert [path.name for path in packages.iterdir()] == ["mine.py"] and not Path("/tmp/lemma-was-here").exists()
    assert [(path.name, path.stat().st_mode, path.stat().st_mtime_ns) for path in (packages, mine)] == before


@pytest.mark.parametrize("confined", ["namespaces", "landlock"])
def test_a_program_writes_in_a_folder_of_its_own(confined: str, sandbox: Sandbox, monkeypatch: Any) -> None:
    """It is empty at first, and gone with the sandbox; only a Python installed below /tmp is seen there."""
    monkeypatch.setattr(Sandbox, "confine", confined)
    below = [Path(sys.prefix).parts[2]] if confined == "namespaces" and sys.prefix.startswith("/tmp/") else []
    write = "import os; os.mkdir('d'); open('x', 'w').write('7'); os.rename('x', 'd/y'); open('d/y').read()"
    assert sandbox.run("import os; os.listdir('.')") == f"{below}\n" and sandbox.run(write) == "'7'\n"
    folder = sandbox.run("print(os.getcwd())").strip()
    sandbox.close()
    assert sandbox.run("import os; os.listdir('.')") == f"{below}\n"
    assert folder == "/tmp" if confined == "namespaces" else not Path(folder).exists()


def test_huge_and_odd_output_is_cut_and_readable(sandbox: Sandbox) -> None:
    output = sandbox.run("print('a' * 10 ** 7); print('\\ud800 \\x00 \\u202e 𝔘')")
    assert len(output) < 2100 and "characters left out" in output
    assert output.startswith("aaa") and output.endswith("\\ud800 \x00 \u202e 𝔘\n")
    output.encode("utf-8")


def test_a_program_that_answers_for_itself_and_reads_no_orders_is_stopped() -> None:
    box = Sandbox(SandboxLimits(seconds=1.0, packages=False))
    message = pack({"output": "mine"})
    forged = f"for f in range(3, 64):\n  try: os.write(f, {message!r})\n  except OSError: pass"
    code = f"import os, threading\ndef f():\n {forged}\nthreading.Timer(0.2, f).start()\nwhile True: pass"
    assert box.run(code) == "mine"
    assert box.run("x = '" + "a" * 300_000 + "'").startswith("The program was stopped")
    assert box.run("6 * 7") == "42\n"
    box.close()


def test_an_endless_program_is_stopped_and_the_next_one_runs() -> None:
    box = Sandbox(SandboxLimits(seconds=0.7, packages=False))
    begin = time.monotonic()
    assert box.run("x = 1\nwhile True: pass") == "The program was stopped after 0.7 s. Its variables are gone."
    assert box.run("while True:\n try:\n  while True: pass\n except BaseException: pass").startswith(
        "The program was stop"
    )
    assert time.monotonic() - begin < 20
    assert "NameError" in box.run("x")
    box.close()


ORPHAN = """
import os, signal, sys, threading
from lemma.environments.sandbox import Sandbox, SandboxLimits
box = Sandbox(SandboxLimits(seconds=60, packages=False))
box.run("1")
print(box._child.process.pid, flush=True)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
box.run("import signal\\nwhile True: pass")
"""


def test_nothing_is_left_of_a_trainer_that_was_killed() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    for _ in range(100):
        if not psutil.pid_exists(int(done.stdout)):
            break
        time.sleep(0.1)
    own = [one for one in psutil.process_iter(["cmdline"]) if "python_child.py" in str(one.info["cmdline"])]
    assert not psutil.pid_exists(int(done.stdout))
    assert not [one for one in own if one.ppid() == 1]


def test_a_machine_without_isolation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "confine", "none")
    with pytest.raises(UserError, match=r"cannot keep programs of the model from .*`isolated: false`"):
        PythonTools().check()


def said(text: str, options: PythonTools, **more: Any) -> Action:
    return understanding(ToolSpeech("hermes", False, tuple(options.tools())), make_format("own"))(text, "stop")


def test_an_episode_of_calls_ends_with_a_turn_that_calls_nothing() -> None:
    options = PythonTools(calls_per_turn=2, seconds=20)
    world = options.make()
    world.reset(Problem((), ("5",), id="p"), 0)
    call = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'
    both = call % ("calculator", "expression", "2 * 21") + call % ("python", "code", "x = 6; print(x * 7)")
    reply = world.step(said(both, options))
    assert (reply.results, reply.text, reply.done) == (("42", "42"), "42\n42", False)
    reply = world.step(said(call % ("python", "code", "x + 1") + call % ("pyton", "code", "x") + both, options))
    assert reply.results[0] == "7" and reply.results[1].startswith("error: there is no tool 'pyton'; there are: ")
    assert reply.results[2:] == ("error: only 2 calls are made in one turn",) * 2
    assert world.step(said("It is 5.", options)).done
    world.close()
    forgets = PythonTools(keep_variables=False, seconds=20).make()
    forgets.reset(Problem((), ("5",), id="p"), 0)
    assert forgets.step(said(call % ("python", "code", "x = 6"), options)).text == "(no output)"
    assert "NameError" in forgets.step(said(call % ("python", "code", "x"), options)).text
    forgets.close()


def test_the_grader_judges_the_last_turn() -> None:
    tokenizer, fmt = tiny_tokenizer(["<code>", "</code>"]), make_format({"name": "r1_zero", "preamble": False})
    options = PythonTools(offers=["calculator"], calls="code", describe=False, turns=3, workers=0)
    options.check()
    problem = opened_all(options, [Problem((Message("user", "how many ?"),), ("35",), id="p")], 0)[0]
    speech = options.speech(fmt, tokenizer)
    bridge = Bridge.of(fmt, tokenizer, (), 16, speech)
    world = World(options, bridge, 512, understand=understanding(speech, fmt))
    answers = ["</think> <answer> 35 </answer>", "</think> <answer> 36 </answer>", "<code> 35 </code>"]

    def say(request: Request, sample: int) -> str:
        if "turn" not in request.key:
            return "<code> 5 * 7 </code>"
        return answers[int(request.key[3])] if request.key[-1] == 1 else "<code> 1 + </code>"

    engine = Scripted(tokenizer, say)
    scorer = Scorer(fmt, [make_reward("accuracy")], tokenizer)
    ask = SampleRequest(("rl", 1, 0), problem, encode_prompt(fmt, problem, tokenizer).astype("int32"), 3)
    found = sorted(play(engine, [ask], Sampling(max_tokens=16), scorer, world=world), key=lambda one: one.order)
    assert [(one.verdict, one.reward, len(one.turns)) for one in found] == [
        ("right", 1.0, 2), ("wrong", 0.0, 2), ("wrong", 0.0, 3)
    ]  # fmt: skip
    assert [turn.heard for turn in found[2].turns] == ["35", "35", "error: this is not an arithmetic expression"]
    assert tokenizer.decode(found[0].turns[1].context) == "User: 35 Assistant: <think>"
    assert ReinforcementOptions.model_validate({"environment": "python", "rollout": {"max_tokens": 8}}).rewards == [
        make_reward("accuracy")
    ]


def test_calls_and_results_travel_to_workers_and_back() -> None:
    said = Action("x", "length", "y = 1", ({"name": "python", "arguments": {"code": "é"}}, {"error": "no"}), "7")
    problem = Problem((Message("user", "?", {"name": "eva"}),), ("5",), id="p", choices=("a", "b"))
    for order in (EnvOrder(1, "step", said), EnvOrder(1, "reset", None, Opening(problem, 3, (said,)))):
        (row,) = unpack(bytearray(pack(asdict(order))))
        assert order_from(row) == order
    reply, message = Observation("a\nb", results=("a", "b")), Message("user", "hm", {"k": [1]})
    for kind, value in [
        ("given", reply), ("given", Outcome(1.0, True)), ("given", (message,)), ("given", ()),
        ("replayed", (reply, reply)), ("error", "why"),
    ]:  # fmt: skip
        answer = EnvAnswer(1, kind, value, 0.5)
        (row,) = unpack(bytearray(pack(asdict(answer))))
        assert answer_from(row) == answer
