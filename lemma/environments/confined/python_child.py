"""What runs inside a sandbox: a Python that executes programs written by a model. Standard library only.

    python -s -P -S -B python_child.py SETTINGS     messages on stdin and stdout, as child_frames.py packs them

A supervisor, which never runs the model's code, waits for the end of the process that does, or of its input, which
means that the trainer is gone, and ends it where it is too large. A program reads Python and its packages, writes in a
folder of its own that is empty at first and disappears with the process, and has limits on memory, CPU time, threads,
files and output. The first message says how it is confined.
"""

from __future__ import annotations

import json
import os
import sys
from typing import BinaryIO

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(os.path.join(sys.path[-1], "..", "..", "children"))
import child_frames
import confinement
import syscall_filter

OWN = "/tmp"
FILES = 1000


def confine(settings: dict, kind: str, folder: str) -> str:
    """Drop everything that a program does not need. Returns what is missing, in words."""
    read = visible(settings["readable"])
    if kind == "namespaces":
        confinement.enter_root(confinement.View(read, OWN, settings["files_mb"], FILES))
    elif kind == "landlock":
        confinement.landlock([path for path, _ in read], folder)
    os.chdir(folder)
    limits = confinement.Limits(settings["memory_mb"], settings["processor_seconds"], settings["files_mb"])
    confinement.set_limits(limits, 0, own_users=kind == "namespaces")
    if kind != "none":
        confinement.drop_powers()
    return syscall_filter.install()


def visible(folders: list[str]) -> tuple[tuple[str, str], ...]:
    """The folders that are there, with the paths by which a program sees them, without what is inside of another."""
    outer = confinement.outermost(os.path.normpath(path) for path in folders if os.path.isdir(path))
    return tuple((os.path.realpath(path), path) for path in outer)


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


def serve(settings: dict, kind: str, missing: str, folder: str) -> None:
    """Run programs one at a time, in one namespace."""
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    try:
        unfiltered = confine(settings, kind, folder)
    except OSError as error:
        kind, unfiltered = "", str(error)
    names: dict = {"__name__": "__main__", "__builtins__": __builtins__}
    del sys.path[-2:]
    sys.path += settings["packages"]
    import random

    random.seed(settings["seed"])
    held = "" if unfiltered or kind == "none" else kind
    send(answers, {"confined": held, "missing": "; ".join(filter(None, (missing, unfiltered)))})
    while True:
        said = run(child_frames.receive(orders.read)["code"], names, settings["output"])
        send(answers, {"output": said.encode("utf-8", "backslashreplace").decode("utf-8")})


def send(answers: BinaryIO, message: dict) -> None:
    answers.write(child_frames.pack(message))
    answers.flush()


def main() -> None:
    settings = json.loads(sys.argv[1])
    kind, missing = settings["confine"], ""
    if kind == "auto":
        kind, missing = confinement.strongest(kind)
    folder = OWN if kind == "namespaces" else f"{OWN}/lemma-python-{os.urandom(8).hex()}"
    if kind == "namespaces":
        confinement.enter_namespaces()
    else:
        os.mkdir(folder, 0o700)
    alive, held = os.pipe()
    proc = os.open("/proc", os.O_RDONLY)
    child = os.fork()
    if child:
        os.close(1)
        most = confinement.View((), folder, settings["files_mb"], FILES)
        confinement.await_end(child, [(0, 0)], proc, "" if kind == "namespaces" else folder, most)
        if kind != "namespaces":
            confinement.remove(folder)
        os._exit(0)
    os.close(held)
    os.close(proc)
    confinement.die_with_parent(alive)
    os.close(alive)
    try:
        serve(settings, kind, missing, folder)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
