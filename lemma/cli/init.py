"""`lemma init`: four questions, and a commented recipe that fits the machine."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, program
from lemma.core.errors import UserError, nearest

if TYPE_CHECKING:
    from lemma.planning.new_recipe import Answers

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


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("init", help="write a recipe to begin with", description=DESCRIPTION)
    parser.add_argument("--task", choices=list(TASKS), help="; ".join(f"{k}: {v}" for k, v in TASKS.items()))
    parser.add_argument("--model", metavar="NAME", help="a folder, a hub name, or `tiny` for the built-in model")
    parser.add_argument("--data", metavar="NAME", help="a file, a hub name, or `arithmetic` for the built-in problems")
    parser.add_argument("--gpu", metavar="GIB", type=float, help="memory of the GPU in GiB; 0 for none")
    parser.add_argument("--to", metavar="FILE", type=Path, default=Path("recipe.yaml"), help="file (recipe.yaml)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.planning.new_recipe import not_here, render
    from lemma.recipe import load_recipe

    if args.to.exists():
        raise UserError(f"{args.to} exists already", fix="write --to and another name")
    answers = ask(args)
    text = render(answers, TASKS[answers.task], args.to)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    args.to.write_text(text, encoding="utf-8")
    recipe = load_recipe(args.to)
    lemma = program()
    print(f"wrote {args.to}; `{lemma} plan {args.to}` shows what it would do, `{lemma} train {args.to}` does it")
    for sentence in not_here(recipe):
        print(f"warning: {sentence}")
    return 0


def ask(args: argparse.Namespace) -> Answers:
    from lemma.planning.new_recipe import Answers

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
