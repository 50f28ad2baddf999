"""`lemma download model|dataset NAME`: fetch from the Hugging Face hub, or from the mirror that HF_ENDPOINT names."""

from __future__ import annotations

import argparse
from pathlib import Path

from lemma.cli.parser import Parser

DESCRIPTION = """\
Fetch a model or a dataset from the Hugging Face hub into a folder, whole or only some files. HF_ENDPOINT names a
mirror, HF_TOKEN a login. The same command given again goes on where a download stopped, and fetches only what
changed."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("download", help="fetch a model or a dataset", description=DESCRIPTION)
    parser.add_argument("kind", choices=["model", "dataset"], help="what to fetch")
    parser.add_argument("name", metavar="NAME", help="owner/name on the hub, or the short name of a known dataset")
    parser.add_argument("--to", metavar="DIR", type=Path, help="folder (default: model/NAME or data/NAME)")
    parser.add_argument("--only", metavar="GLOB", help="only files of that name, such as '*Q8_0.gguf'")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.data.hub import download

    folder = download(args.kind, args.name, args.to, args.revision, args.only)
    files = [path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.relative_to(folder).parts]
    size = sum(path.stat().st_size for path in files)
    print(f"{args.name}: {len(files)} files, {size / 1e6:,.1f} MB in {folder}")
    return 0
