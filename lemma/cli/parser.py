"""The parser of every command: options are never abbreviated, and a mistake gets one sentence."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lemma.core.errors import UserError, nearest

if TYPE_CHECKING:
    from lemma.core.events import Event

HELP = ("-h", "--help")
# Where a command writes to, and what others call that: accepted, and shown nowhere.
TO, OTHERS = "--to", ("--out", "--output")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError`. `appendix`, where given, makes the end of the help when it is asked
    for, so that nothing heavy is imported before."""

    appendix: Callable[[], str] | None = None

    def __init__(self, **settings: Any):
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **settings})

    def _add_action(self, action: Any) -> Any:
        if TO in action.option_strings:
            self._option_string_actions |= dict.fromkeys(OTHERS, action)
        return super()._add_action(action)

    def error(self, message: str) -> NoReturn:
        raise UserError(message, fix=f"`{self.prog} --help` shows how")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UserError(f"`{self.prog}` does not know '{value}'", fix=nearest(str(value), map(str, action.choices)))

    def format_help(self) -> str:
        appendix = "" if self.appendix is None else f"\n{self.appendix()}"
        return super().format_help() + appendix

    def refuse(self, extras: Sequence[str], arguments: Sequence[str]) -> NoReturn:
        """Say what to write instead of arguments that mean nothing to this command, or to the one inside it."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word in arguments:
                    if word in action.choices:
                        action.choices[word].refuse(extras, arguments[arguments.index(word) + 1 :])
        first = extras[0]
        if first.startswith("-"):
            name = first.partition("=")[0]
            raise UserError(f"`{self.prog}` has no option {name}", fix=self._closest(name))
        if "=" in first and "--set" in self._option_string_actions:
            raise UserError(f"'{first}' has no --set before it", fix=f"write `--set {first}`")
        raise UserError(f"`{self.prog}` does not know what to do with '{first}'", fix=f"`{self.prog} --help` shows how")

    def _closest(self, name: str) -> str:
        """What to write instead of an option that there is not; dashes make no two options alike."""
        options = {
            option.lstrip("-"): option for option in self._option_string_actions if option not in (*HELP, *OTHERS)
        }
        phrase = nearest(name.lstrip("-"), options)
        meant = next((option for bare, option in options.items() if phrase == f"did you mean '{bare}'?"), None)
        return f"did you mean '{meant}'?" if meant else f"write one of: {', '.join(sorted(options.values()))}"


def add_recipe(parser: Parser) -> None:
    """The arguments of every command that reads a recipe."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML or JSON file")
    add_overrides(parser, "replace a value of the recipe, such as stages.sft.optim.lr=1e-5; may be repeated")


def add_overrides(parser: argparse.ArgumentParser, purpose: str) -> None:
    """`--set KEY=VALUE`, as often as one likes."""
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help=purpose)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=["native", "vllm", "transformers"], default="native", help="what generates (native)"
    )


def say(event: Event) -> None:
    """What a command tells while it works; its results alone are on standard output."""
    from lemma.core.events import Said

    if isinstance(event, Said):
        print(f"lemma: {event.text}", file=sys.stderr)


def add_ranks(parser: argparse.ArgumentParser, what: str, default: str = "1") -> None:
    parser.add_argument(
        "--ranks", metavar="N", type=int, help=f"processes that share the {what}, one on each GPU (default: {default})"
    )


def program() -> str:
    """What to type for `lemma` here: as this process was started, where `lemma` alone would not find this program."""
    script = Path(sys.argv[0])
    if script.parts[-2:] == ("lemma", "__main__.py"):
        return f"{shlex.quote(sys.orig_argv[0])} -m lemma"
    found = shutil.which("lemma")
    if script.name != "lemma" or not script.is_file() or (found is not None and script.samefile(found)):
        return "lemma"
    return shlex.quote(sys.argv[0])


def named(text: str) -> list[str]:
    """The names in `a, b`."""
    return [name.strip() for name in text.split(",") if name.strip()]
