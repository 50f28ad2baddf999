"""The command `lemma`: one file per command; parses, calls, prints; no logic."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO, cast

from lemma.cli.parser import Parser
from lemma.cluster.rank_end import INTERRUPTED, run_and_exit
from lemma.core.errors import UserError, nearest, warnings_said
from lemma.core.system_errors import explained
from lemma.core.terminal import VisibleStream, show_error, show_thread_error, visible_logs

# The commands and what each is for; the module of the same name in this folder has `add(subparsers)`.
COMMANDS: dict[str, str] = {
    "init": "write a recipe to begin with, from four questions",
    "recipes": "list the recipes that come with Lemma, and copy one",
    "train": "run the stages of a recipe; the same command resumes where it stopped",
    "plan": "what a recipe would do; nothing is loaded or written",
    "data": "look at data as the model will see it, and prepare files",
    "download": "fetch a model or a dataset from the hub",
    "doctor": "try every part that Lemma can use and say what repairs what is broken",
    "eval": "measure a model on benchmarks, or grade what it said again",
    "generate": "ask a model a question and read its answer",
    "serve": "serve a model over an OpenAI-compatible API",
    "debug": "look into what a model generates under a recipe, and what to change",
    "env": "play and try the environment of a recipe",
    "report": "write a run, or several, as one page to look at",
    "watch": "watch a run live in a browser",
    "runs": "a table of runs, and giving back the disk space of old ones",
    "compare": "is one evaluation better than another, on the same problems; or one run",
    "grade": "verdicts on a file of answers",
    "export": "write a checkpoint of a run as a model that plain transformers loads",
    "demo": "train the built-in tiny model and show what it learnt",
}
# The commands that run code of the user's own, such as rewards.
RUN_OWN_CODE = ("train", "eval", "debug")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code: 0 well, 1 a plan that cannot be carried out, 2 a mistake of the user, 130
    interrupted. Without arguments this is a program of its own, whose arguments are the process's."""
    if argv is not None:
        return _main(argv)
    sys.excepthook = show_error
    threading.excepthook = show_thread_error
    return run_and_exit(lambda: _main(None))


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_outputs()
    before = sys.stdout
    if before.isatty():
        sys.stdout = cast("TextIO", VisibleStream(before))
    try:
        with visible_logs(), warnings_said(lambda text: print(f"lemma: warning: {text}", file=sys.stderr)):
            code = _run(arguments, is_program=argv is None)
            _leave_quietly(argv)
        sys.stdout.flush()
        return code
    except UserError as error:
        for sentence in str(error).splitlines():
            _complain(sentence)
        if "RANK" in os.environ:
            with suppress(KeyboardInterrupt):  # the sentence is said, and others may be waited for
                from lemma.cluster.joining import report_early_exit

                report_early_exit(str(error))
        return 2
    except KeyboardInterrupt:
        _leave_quietly(argv)
        with suppress(OSError):  # Ctrl-C also ends a program that our output is piped to
            print("lemma: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; without this, Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        told = explained(error)
        if told is None:
            raise
        return _complain(*told)
    finally:
        sys.stdout = before


def _leave_quietly(argv: Sequence[str] | None) -> None:
    """The way out of a program of its own is short, and interrupting it prints tracebacks."""
    if argv is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _open_closed_outputs() -> None:
    """Where the command was started with `>&-`, what it says goes nowhere, not into a file of that number."""
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


def _complain(sentence: str, code: int = 2) -> int:
    print(f"lemma: error: {sentence}", file=sys.stderr)
    return code


def _run(arguments: list[str], is_program: bool) -> int:
    command = next((word for word in arguments if not word.startswith("-")), None)
    parser = Parser(prog="lemma", description="Teach a language model to reason.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, purpose in COMMANDS.items():
        if name == command:
            importlib.import_module(f"lemma.cli.{name}").add(subparsers)
        else:
            subparsers.add_parser(name, help=purpose)
    if command is not None and command not in COMMANDS:
        raise _unknown(command)
    try:
        options, extras = parser.parse_known_args(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    if extras:
        parser.refuse(extras, arguments)
    options.arguments = arguments
    if options.version:
        return _print_version()
    if command is None:
        parser.print_help()
        return 0
    if is_program and command in RUN_OWN_CODE:
        from lemma.core.descendants import end_descendants_at_exit

        end_descendants_at_exit()
    return int(options.run(options))


def _unknown(command: str) -> UserError:
    if command.endswith((".yaml", ".yml")):
        return UserError(f"'{command}' is not a command", fix=f"write `lemma train {command}`")
    return UserError(f"'{command}' is not a command", fix=nearest(command, COMMANDS))


def _print_version() -> int:
    from lemma.core.version import lemma_version

    print(f"lemma {lemma_version()}")
    return 0
