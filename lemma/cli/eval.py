"""`lemma eval MODEL --benchmarks a,b`: measure a model; `lemma eval --rescore FOLDER`: grade what it said again."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, named
from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.evaluation.results import Report

DESCRIPTION = """\
Measure a model on benchmarks. MODEL is a run folder, an exported model, an adapter folder, any folder in the Hugging
Face format, a GGUF file, or a hub name. The same command given again goes on where it stopped. The format is the one
named here, else that of the model's run, else the one whose chat template was saved with the tokenizer, else the
benchmark's."""

DEFAULTS = {
    "top_p": 1.0, "max_tokens": 4096, "thinking": "after", "seed": 0, "device": "auto", "engine": "native",
    "likelihood": False,
}  # fmt: skip
UNUSUAL = ("shots", "shots_as", "likelihood", "preset")
RESCORE_USES = {"rescore", "grader", "out", "command", "version", "run"}


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("eval", help="measure a model on benchmarks", description=DESCRIPTION)
    add_option = parser.add_argument
    add_option(
        "model", metavar="MODEL", nargs="?", help="a run, a model folder, an adapter folder, a GGUF file or a hub name"
    )
    add_option("--benchmarks", metavar="A,B", help="names (see below), data files, hub datasets, YAML entries")
    add_option("--samples", metavar="K", type=int, help="samples of each problem (default: the benchmark's own)")
    add_option("--temperature", metavar="T", type=float, help="default: 0 for one sample, 0.6 for several")
    add_option("--top-p", metavar="P", type=float, help="nucleus sampling (default: 1)")
    add_option("--max-tokens", metavar="N", type=int, help="longest completion (default: 4096)")
    add_option("--format", metavar="NAME", help="how questions are put and answers are read")
    add_option("--shots", metavar="N", type=int, help="solved examples in front of each question (default: none)")
    add_option("--shots-as", choices=["chat", "text"],
               help="examples as chat turns or plain text (default: chat where there is a chat template)")  # fmt: skip
    add_option("--likelihood", action="store_true", default=None,
               help="multiple choice: take the likeliest option, in place of what the model writes")  # fmt: skip
    add_option("--preset", metavar="NAME", help="settings of a published evaluation; what is written here goes first")
    add_option("--thinking", choices=["after", "whole"],
               help="whole: look for an answer also in thoughts that never end (default: after)")  # fmt: skip
    add_option("--grader", metavar="NAME", help="lemma, or graders of other systems such as math_verify,boxed_slow")
    add_option("--limit", metavar="N", type=int, help="at most so many problems of each benchmark, always the same")
    add_option("--seed", metavar="S", type=int, help="another seed, other samples (default: 0)")
    add_option("--data-dir", metavar="DIR", help="a folder of data files that stands in for the hub")
    add_option("--device", choices=["auto", "cpu", "cuda"], help="where to compute")
    add_option("--engine", choices=["native", "vllm", "transformers"], help="what generates (default: native)")
    add_option("--out", metavar="DIR", help="folder of the results (default: evaluations/MODEL-SETTINGS)")
    add_option("--rescore", metavar="FOLDER",
               help="grade the samples of an evaluation again, without a model: takes --grader and --out")  # fmt: skip
    parser.set_defaults(run=run)
    parser.appendix = _names


def _names() -> str:
    from lemma.evaluation.benchmarks import BENCHMARKS
    from lemma.evaluation.presets import PRESETS
    from lemma.formats import FORMATS
    from lemma.grading.compat import COMPAT

    lists: dict[str, Iterable[str]] = {
        "benchmarks": BENCHMARKS, "formats": FORMATS, "graders": ["lemma", *COMPAT], "presets": PRESETS,
    }  # fmt: skip
    return "\n".join(f"{what}: {', '.join(names)}" for what, names in lists.items()) + "\n"


def run(args: argparse.Namespace) -> int:
    if args.rescore is not None:
        _check_rescore(args)
        return _rescore(args)
    from lemma.evaluation.presets import Preset, find_preset

    preset = Preset({}) if args.preset is None else find_preset(args.preset)
    for name, value in {**DEFAULTS, **preset.options}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    _check(args)
    from lemma.api.evaluate_call import measure
    from lemma.evaluation.benchmarks import find_benchmark
    from lemma.evaluation.evaluator import EvalSettings, load_all
    from lemma.evaluation.lenient import hints
    from lemma.evaluation.rescore import check_graders
    from lemma.formats import make_format
    from lemma.reporting.console import Console

    names = [
        *("samples", "temperature", "top_p", "max_tokens", "seed", "limit", "thinking", "data_dir"),
        *("shots", "shots_as", "likelihood"),
    ]
    settings = EvalSettings(
        **{name: getattr(args, name) for name in names}, grader=args.grader or "lemma", format=args.format
    )
    check_graders(settings.grader)
    if args.format is not None:
        make_format(args.format)
    benchmarks = load_all([preset.of(find_benchmark(one)) for one in named(args.benchmarks)], settings)
    folder = Path(args.out) if args.out else _default_folder(args, [one.name for one in benchmarks])
    console = Console(sys.stderr)
    try:
        report = measure(args.model, benchmarks, settings, folder, args.device, args.engine, console).report
    finally:
        console.close(failed=False)
    _show(report, folder)
    for sentence in hints(report):
        print(f"lemma: warning: {sentence}", file=sys.stderr)
    return 0


def _check_rescore(args: argparse.Namespace) -> None:
    """What was sampled is what it is: only the grader can be another."""
    if args.model is not None or args.benchmarks is not None:
        raise UserError("--rescore grades saved samples and takes no model", fix="leave MODEL and --benchmarks out")
    for name, value in vars(args).items():
        if name not in RESCORE_USES and value is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"--rescore grades saved samples as they are, and {option} would change nothing",
                fix=f"leave {option} out; only --grader and --out go with --rescore",
            )


def _check(args: argparse.Namespace) -> None:
    if args.model is None:
        raise UserError("there is no model to evaluate", fix="write `lemma eval MODEL --benchmarks gsm8k`")
    if not args.benchmarks or not args.benchmarks.strip(" ,"):
        raise UserError("no benchmark is named", fix="write for example `--benchmarks gsm8k,math500`")
    for name, least in (("samples", 1), ("max_tokens", 1), ("temperature", 0), ("seed", 0), ("limit", 1), ("shots", 0)):
        value = getattr(args, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {value}", fix=f"write {least} or more")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p is {args.top_p}", fix="write a number above 0 and up to 1")


def _default_folder(args: argparse.Namespace, benchmarks: list[str]) -> Path:
    """A folder that belongs to this command: giving it again goes on there."""
    from lemma.core.types import content_id

    said = {name: value for name, value in vars(args).items() if name not in ("run", "out", "command", "data_dir")}
    said = {name: value for name, value in said.items() if value or name not in UNUSUAL}
    place = Path(args.model)
    stem = "-".join(place.parts[-2:] if place.exists() else place.parts).strip("./") or "model"
    return Path("evaluations") / f"{stem}-{'+'.join(benchmarks)[:60]}-{content_id(said)[:8]}"


def _show(report: Report, folder: Path) -> None:
    from lemma.evaluation.results import as_markdown
    from lemma.evaluation.terminal_table import as_table

    if sys.stdout.isatty():
        sys.stdout.write(as_table(report, shutil.get_terminal_size().columns))
    else:
        sys.stdout.write(as_markdown(report))
    print(f"lemma: the results are in {folder}", file=sys.stderr)


def _rescore(args: argparse.Namespace) -> int:
    from lemma.core.events import Progressed
    from lemma.evaluation.rescore import rescore
    from lemma.reporting.console import Console

    console = Console(sys.stderr)
    try:
        before, after, folder = rescore(
            Path(args.rescore),
            args.grader or "lemma",
            Path(args.out) if args.out else None,
            told=lambda done, total: console(Progressed("grading", done, total)),
        )
    finally:
        console.close(failed=False)
    _show(after, folder)
    for name, rows in after.rows.items():
        changed = sum(new.verdict != old.verdict for new, old in zip(rows, before.rows[name], strict=True))
        print(f"lemma: {name}: {changed} of {len(rows)} verdicts are different now", file=sys.stderr)
    return 0
