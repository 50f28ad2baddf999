"""`lemma init`: four questions, and a commented recipe that fits the machine."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.cli.parser import Parser, program
from lemma.core.errors import UserError, nearest

if TYPE_CHECKING:
    from lemma.models.fitting import Fit
    from lemma.recipe import Recipe

DESCRIPTION = """\
Write a recipe to begin with. It asks for the task, the model, the data and the GPU's memory; options answer in
advance. How the model is trained (all weights, adapters, 4-bit weights) and how much is computed at a time follow from
the memory."""
TASKS = {
    "sft": "imitate worked solutions",
    "rl": "learn from whether answers are right (GRPO)",
    "sft-rl": "first imitate, then learn from what is right",
    "preference": "learn which of two responses is liked (DPO)",
}
DATA = {"sft": "gsm8k", "rl": "gsm8k", "sft-rl": "gsm8k", "preference": "ultrafeedback"}
TEMPLATE = Path(__file__).with_name("new_recipe.yaml.jinja")


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("init", help="write a recipe to begin with", description=DESCRIPTION)
    parser.add_argument("--task", choices=list(TASKS), help="; ".join(f"{k}: {v}" for k, v in TASKS.items()))
    parser.add_argument("--model", metavar="NAME", help="a folder, a hub name, or `tiny` for the built-in model")
    parser.add_argument("--data", metavar="NAME", help="a file, a hub name, or `arithmetic` for the built-in problems")
    parser.add_argument("--gpu", metavar="GIB", type=float, help="memory of the GPU in GiB; 0 for none")
    parser.add_argument("--to", metavar="FILE", type=Path, default=Path("recipe.yaml"), help="file (recipe.yaml)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.recipe import load_recipe

    if args.to.exists():
        raise UserError(f"{args.to} exists already", fix="write --to and another name")
    answers = ask(args)
    text = render(answers, args.to)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    args.to.write_text(text, encoding="utf-8")
    recipe = load_recipe(args.to)
    lemma = program()
    print(f"wrote {args.to}; `{lemma} plan {args.to}` shows what it would do, `{lemma} train {args.to}` does it")
    for sentence in _not_here(recipe):
        print(f"warning: {sentence}")
    return 0


def _not_here(recipe: Recipe) -> Iterator[str]:
    """What is written as a path and does not exist. Names of the hub are not asked for."""
    from lemma.data.sources import check_files
    from lemma.models.places import TINY, resolve

    stage: Any = next(iter(recipe.stages.values()))  # all have the same data
    checks: list[Callable[[], object]] = [lambda: check_files(stage.data)]
    if recipe.model.path != TINY:
        checks.insert(0, lambda: resolve(recipe.model.path))
    for check in checks:
        try:
            check()
        except UserError as error:
            yield str(error)


@dataclass(frozen=True)
class Answers:
    task: str
    model: str
    data: str
    gib: float


def ask(args: argparse.Namespace) -> Answers:
    task = args.task or _question("Task", "sft-rl", choices=TASKS)
    model = args.model or _question("Model (folder, hub name, or tiny)", "tiny")
    data = args.data or _question("Data (file or hub name)", "arithmetic" if model == "tiny" else DATA[task])
    measured = _gpu_gib() if args.gpu is None and model != "tiny" else 0.0
    gib = args.gpu if args.gpu is not None else measured
    if args.gpu is None and model != "tiny":
        gib = _number("GPU memory in GiB, 0 for none", measured)
    if not 0 <= gib < 10_000:
        raise UserError(f"--gpu is {gib:g}", fix="write the GPU's memory in GiB, 0 for none")
    if model == "tiny" and (data != "arithmetic" or task == "preference"):
        raise UserError(
            "the built-in model knows only the words of the built-in arithmetic",
            fix="write --data arithmetic and another task than preference, or name another model",
        )
    return Answers(task, model, data, gib)


def _question(words: str, default: str, choices: dict[str, str] | None = None) -> str:
    """Ask at a terminal until the answer is one; elsewhere say which options would have answered."""
    option = f"--{words.split()[0].lower()}"
    if not sys.stdin.isatty():
        fix = "this is not a terminal, so nothing is asked: give --task, --model, --data and --gpu"
        raise UserError(f"{option} is missing", fix=fix)
    for name, meaning in (choices or {}).items():
        print(f"  {name:<12} {meaning}")
    while True:
        answer = input(f"{words} [{default}]: ").strip() or default
        if choices is None or answer in choices:
            return answer
        print(f"  {nearest(answer, choices)}")


def _number(words: str, default: float) -> float:
    if not sys.stdin.isatty():
        return default
    while True:
        answer = input(f"{words} [{default:g}]: ").strip() or str(default)
        if re.fullmatch(r"\d+(\.\d+)?", answer):
            return float(answer)
        print("  write a number")


def _gpu_gib() -> float:
    import torch

    if not torch.cuda.is_available():
        return 0.0
    return round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)


def render(answers: Answers, to: Path) -> str:
    from jinja2 import Environment, StrictUndefined

    fit, memory = _fit(answers)
    rates = {"sft": "2e-4" if fit.way != "full" else "1e-5", "rl": "2e-5" if fit.way != "full" else "1e-6"}
    rates["preference"] = "5e-6" if fit.way != "full" else "5e-7"
    tiny = answers.model == "tiny"
    if tiny:
        rates |= {"sft": "2e-3", "rl": "2e-4"}
    model = answers.model.rpartition("/")[2].removesuffix(".gguf")
    name = re.sub(r"[^a-z0-9]+", "-", f"{model}-{answers.task}".lower()).strip("-")
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE.read_text())
    return template.render(
        title=f"{answers.model}: {TASKS[answers.task]}. Written by `lemma init`.",
        file=to,
        run_dir=f"runs/{name}",
        model=_as_yaml(answers.model),
        data=_as_yaml(answers.data),
        task=answers.task,
        tiny=tiny,
        is_file=Path(answers.data).suffix != "",
        on_cpu=answers.gib == 0,
        way=fit.way,
        checkpointing=fit.checkpointing,
        budget=fit.token_budget,
        memory=memory,
        rates=rates,
    )


def _as_yaml(text: str) -> str:
    import yaml

    return yaml.safe_dump(text, width=10_000, allow_unicode=True).removesuffix("\n...\n").strip()


def _fit(answers: Answers) -> tuple[Fit, str]:
    """How the model is trained, and the sentence that says why."""
    from lemma.cli.plan_memory import shape_of
    from lemma.core.host_memory import host_memory
    from lemma.models.fitting import Fit, fit_memory, guess_shape, in_gib
    from lemma.models.memory import GIB
    from lemma.models.model_options import ModelOptions

    on_cpu = answers.gib == 0
    available = host_memory() if on_cpu else answers.gib * GIB
    known = shape_of(ModelOptions(path=answers.model))
    guessed = isinstance(known, str)
    shape = guess_shape(answers.model) if isinstance(known, str) else known
    if shape is None:
        return Fit("lora", True, 4096, 0.0), "its size is not known here; check with `lemma plan` when it is downloaded"
    copies = 2 if answers.task == "preference" else 1
    fit = fit_memory(shape, available, "fp32" if on_cpu else "bf16", copies=copies)
    where = "of this machine's memory" if on_cpu else f"of {answers.gib:g} GiB"
    words = {"full": "all weights", "lora": "adapters", "4bit": "adapters on 4-bit weights"}[fit.way]
    told = f"training {words} takes about {in_gib(fit.planned)} {where}" + (", by its name" if guessed else "")
    return fit, told if fit.fits else f"{told}: too much; choose a smaller model or a larger GPU"
