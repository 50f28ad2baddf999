"""`lemma recipes`: the published recipes, from inside the installed package."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap

from lemma.cli.parser import Parser, program
from lemma.core.errors import UserError, nearest

TWIN = "small/"
FOLDER = Path(__file__).parents[1] / "published"
DESCRIPTION = """\
List the recipes that come with Lemma, or copy one here to change it. Those under small/ are the same on the built-in
model and run on a CPU in a minute."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("recipes", help="recipes that come with Lemma", description=DESCRIPTION)
    parser.add_argument("name", metavar="NAME", nargs="?", help="copy this one")
    parser.add_argument("--to", metavar="FILE", type=Path, help="where to (default: NAME.yaml in this folder)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    paths = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.rglob("*.yaml"))}
    if args.name is None:
        print(listed(paths))
        return 0
    name = args.name.removesuffix(".yaml").removeprefix("recipes/")
    if name not in paths:
        raise UserError(f"there is no recipe '{args.name}'", fix=nearest(name, paths))
    to = args.to or Path(f"{Path(name).name}.yaml")
    if to.exists():
        raise UserError(f"{to} exists already", fix="write --to and another name")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(paths[name].read_text(encoding="utf-8"), encoding="utf-8")
    print(f"wrote {to}; `{program()} plan {to}` shows what it does")
    return 0


def listed(paths: Mapping[str, Path]) -> str:
    """Each recipe with what it is; of the small twins, which say nothing new, the names."""
    blocks = {name: about(path) for name, path in paths.items() if not name.startswith(TWIN)}
    twins = [name for name in paths if name.startswith(TWIN)]
    blocks["Small twins, which run on a CPU with the built-in model"] = ", ".join(twins)
    return "\n".join("\n    ".join([name, *wrap(text, 96, break_on_hyphens=False)]) for name, text in blocks.items())


def about(path: Path) -> str:
    """The first paragraph of the comment that a recipe begins with."""
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        words.append(text)
    return " ".join(words)
