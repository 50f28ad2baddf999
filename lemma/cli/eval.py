"""`lemma eval MODEL --benchmarks a,b`: measure a model; `lemma eval --rescore FOLDER`: grade what it said again."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lemma.cli.parser import Parser, add_ranks, named, say
from lemma.config.options import meaning_of
from lemma.config.shape import branches
from lemma.core.errors import UserError
from lemma.evaluation.eval_settings import EvalSettings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from lemma.api.evaluate_call import EngineName
    from lemma.evaluation.benchmarks import Benchmark
    from lemma.evaluation.results import Report

DESCRIPTION = """\
Measure a model on benchmarks. MODEL is a run folder, the folder of a checkpoint, an exported model, an adapter folder,
any folder in the Hugging Face format, a GGUF file, or a hub name. The same command given again goes on where it
stopped. With --environment, the problems are played turn by turn; without --benchmarks, they are the environment's own.
The GPUs of the machine share the work. The format is the one named here, else that of the model's run, else the one
whose chat template was saved with the tokenizer, else the benchmark's."""

RESCORE_USES = {"rescore", "grader", "out", "command", "version", "run", "arguments"}
LETTERS = {
    "samples": "K", "temperature": "T", "top_p": "P", "format": "NAME", "grader": "NAME", "seed": "S",
    "environment": "NAME", "split": "NAME",
    "data_dir": "DIR",
}  # fmt: skip


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("eval", help="measure a model on benchmarks", description=DESCRIPTION)
    add_option = parser.add_argument
    add_option(
        "model", metavar="MODEL", nargs="?", help="a run, a model folder, an adapter folder, a GGUF file or a hub name"
    )
    add_option("--benchmarks", metavar="A,B", help="names (see below), data files, hub datasets, YAML entries")
    add_option("--checkpoint", metavar="WHICH", help="of a run: best, last or a step (default: the final model)")
    for name, field in EvalSettings.model_fields.items():
        add_option(_option(name), **_how_to_read(name, field))
    add_option("--preset", metavar="NAME", help="settings of a published evaluation; what is written here goes first")
    add_option("--device", choices=["auto", "cpu", "cuda"], help="where to compute")
    add_option("--engine", choices=["native", "vllm", "transformers"], help="what generates (default: native)")
    add_option("--to", dest="out", metavar="DIR", help="folder of the results (default: evaluations/MODEL-SETTINGS)")
    add_ranks(parser, "problems", "as many as there are GPUs, 1 on a CPU")
    add_option("--ray", action="store_true", default=None, help="place the ranks on a Ray cluster, as lemma train does")
    add_option("--rescore", metavar="FOLDER",
               help="grade the samples of an evaluation again, without a model: takes --grader and --to")  # fmt: skip
    parser.set_defaults(run=run)
    parser.appendix = _names


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _how_to_read(name: str, field: FieldInfo) -> dict[str, Any]:
    """An option of the command for a setting; one that is not written is None, and the setting's default holds."""
    meaning = meaning_of(EvalSettings, name).removesuffix(".").replace("%", "%%")
    meaning = meaning[:1].lower() + meaning[1:]
    if field.default not in (None, False):
        meaning += f" (default: {field.default})"
    if field.annotation is bool:
        return {"action": "store_true", "default": None, "help": meaning}
    kinds = {part for branch in branches(field.annotation) for part in (get_args(branch) or (branch,))}
    choices = sorted(part for part in kinds if isinstance(part, str))
    if choices:
        return {"choices": choices, "help": meaning}
    kind = next((kind for kind in (int, float) if kind in kinds), str)
    return {"type": kind, "metavar": LETTERS.get(name, "N"), "help": meaning}


def _names() -> str:
    from lemma.environments import ENVIRONMENTS
    from lemma.evaluation.benchmarks import BENCHMARKS
    from lemma.evaluation.eval_settings import PRESETS
    from lemma.formats import FORMATS
    from lemma.grading.compat import COMPAT

    lists: dict[str, Iterable[str]] = {
        "benchmarks": BENCHMARKS, "formats": FORMATS, "graders": ["lemma", *COMPAT], "presets": PRESETS,
        "environments": [name for name in ENVIRONMENTS.everything() if name != "single_turn"],
    }  # fmt: skip
    return "\n".join(f"{what}: {', '.join(names)}" for what, names in lists.items()) + "\n"


def run(args: argparse.Namespace) -> int:
    if args.rescore is not None:
        _check_rescore(args)
        return _rescore(args)
    from lemma.cluster.rank_program import is_a_rank, on_ranks, on_ray
    from lemma.evaluation.eval_settings import find_preset

    preset = None if args.preset is None else find_preset(args.preset)
    _check(args)
    from lemma.api.evaluate_call import checked_settings
    from lemma.evaluation.benchmarks import find_benchmark

    given = {name: getattr(args, name) for name in EvalSettings.model_fields if getattr(args, name) is not None}
    settings = checked_settings(given if preset is None else {**preset.options, **given}, _option)
    wanted = [find_benchmark(one) for one in named(args.benchmarks or "")]
    wanted = wanted if preset is None else [preset.of(one) for one in wanted]
    engine: EngineName = args.engine or "native"
    if args.ray and not is_a_rank():
        return on_ray([word for word in args.arguments if word != "--ray"], args.ranks, args.device, engine)
    hint = "; the same command resumes from there"
    work = partial(_evaluate, args, settings, wanted, engine)
    return on_ranks(work, args.arguments, args.ranks, args.device or "auto", engine=engine, hint=hint)


def _evaluate(args: argparse.Namespace, settings: EvalSettings, wanted: list[Benchmark], engine: EngineName) -> int:
    """Measure, alone or with the other ranks; the first one shows the numbers."""
    from lemma.api.evaluate_call import evaluation_task, measure
    from lemma.api.model_of_run import model_at
    from lemma.core.events import Said, silent
    from lemma.core.ranks import is_leader, leader_first
    from lemma.evaluation.lenient import hints
    from lemma.reporting.console import Console

    with leader_first("the model of a checkpoint"):
        model = model_at(args.model, args.checkpoint)
    console = Console(sys.stderr)
    task = evaluation_task(
        model, wanted, settings, args.environment, args.device or "auto", engine,
        out=args.out, sink=console if is_leader() else silent, more=[args.preset or ""],
    )  # fmt: skip
    if not is_leader():
        measure(task, silent)
        return 0
    try:
        report = measure(task, console).report
    finally:
        console.close(failed=False)
    _show(report, task.folder)
    for sentence in hints(report):
        say(Said(f"warning: {sentence}"))
    return 0


def _check_rescore(args: argparse.Namespace) -> None:
    """What was sampled is what it is: only the grader can be another."""
    if args.model is not None or args.benchmarks is not None:
        raise UserError("--rescore grades saved samples and takes no model", fix="leave MODEL and --benchmarks out")
    for name, value in vars(args).items():
        if name not in RESCORE_USES and value is not None:
            option = _option(name)
            raise UserError(
                f"--rescore grades saved samples as they are, and {option} would change nothing",
                fix=f"leave {option} out; only --grader and --to go with --rescore",
            )


def _check(args: argparse.Namespace) -> None:
    """What cannot be, before problems are loaded."""
    from lemma.api.model_of_run import is_checkpoint
    from lemma.models.places import TINY, resolve

    if args.model is None:
        raise UserError("there is no model to evaluate", fix="write `lemma eval MODEL --benchmarks gsm8k`")
    if args.environment is None and not named(args.benchmarks or ""):
        raise UserError("no benchmark is named", fix="write for example `--benchmarks gsm8k,math500`")
    if args.model != TINY and args.checkpoint is None and not is_checkpoint(args.model):
        resolve(args.model)


def _show(report: Report, folder: Path) -> None:
    from lemma.core.events import Said
    from lemma.evaluation.tables import as_markdown, as_table

    if sys.stdout.isatty():
        sys.stdout.write(as_table(report, shutil.get_terminal_size().columns))
    else:
        sys.stdout.write(as_markdown(report))
    say(Said(f"the results are in {folder}"))


def _rescore(args: argparse.Namespace) -> int:
    from lemma.core.events import Progressed, Said
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
        say(Said(f"{name}: {changed} of {len(rows)} verdicts are different now"))
    return 0
