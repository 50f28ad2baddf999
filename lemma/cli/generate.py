"""`lemma generate MODEL "question"`: ask a model, see its words as they come, and the answer they contain."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.cli.parser import Parser
from lemma.core.errors import UserError
from lemma.core.types import Message, Problem

if TYPE_CHECKING:
    from lemma.formats import Format

DESCRIPTION = """\
Ask a model a question. MODEL is a run folder, an exported model, an adapter folder, any folder in the Hugging Face
format, or a hub name. The format is the run's own; without a run it is the one whose chat template was saved with the
tokenizer, else boxed for a tokenizer that has a chat template and r1_zero for one that has none."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("generate", help="ask a model a question", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a run, a model folder, an adapter folder or a hub name")
    parser.add_argument("question", metavar="QUESTION", help="what to ask; - reads it from standard input")
    parser.add_argument("--format", metavar="NAME", help="how the question is put and the answer is read")
    parser.add_argument("--system", metavar="TEXT", help="system message in place of the format's own; empty: none")
    parser.add_argument("--samples", metavar="N", type=int, default=1, help="how many answers (default: 1)")
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="0 takes the likeliest token (default: 0 for one sample, else 1)"
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, default=1024, help="longest answer (default: 1024)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="another seed, other samples (default: 0)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check(args)
    question = sys.stdin.read().strip() if args.question == "-" else args.question.strip()
    if not question:
        raise UserError("the question is empty", fix='write `lemma generate MODEL "What is 6 times 7?"`')
    from lemma.models.load import load_for_inference

    model, tokenizer = load_for_inference(args.model, args.device)
    fmt = _format(args, tokenizer)
    problem = Problem((Message("user", question),))
    for number, (text, whole) in enumerate(_speak(model, tokenizer, fmt, problem, args), start=1):
        if args.samples > 1:
            print(f"--- sample {number} of {args.samples}")
        if not _streams(args):
            print(text)
        _print_answer(fmt, text, whole, args.max_tokens)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.temperature is None:
        args.temperature = 0.0 if args.samples == 1 else 1.0
    for name, least in (("samples", 1), ("max_tokens", 1), ("temperature", 0), ("seed", 0)):
        if not getattr(args, name) >= least:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} is {getattr(args, name)}", fix=f"write {least} or more")
    if args.samples > 1 and args.temperature == 0:
        raise UserError("samples at temperature 0 are all the same", fix="write `--temperature 1` or `--samples 1`")


def _streams(args: argparse.Namespace) -> bool:
    return bool(args.samples == 1 and sys.stdout.isatty())


def _format(args: argparse.Namespace, tokenizer: Any) -> Format:
    from lemma.formats import FORMATS, make_format

    spec = {"name": args.format} if args.format else _format_of_run(Path(args.model))
    if spec is None:
        template = getattr(tokenizer, "chat_template", None)
        saved = [name for name in FORMATS if template and make_format(name).chat_template == template]
        spec = {"name": saved[0] if saved else "boxed" if template else "r1_zero"}
    if args.system is not None:
        spec = {**spec, "system": args.system}
    return make_format(spec)


def _format_of_run(path: Path) -> dict[str, Any] | None:
    """The format of the run that this folder is, or lies in."""
    from lemma.recipe import load_recipe

    for folder in (path.absolute(), *path.absolute().parents):
        if (folder / "recipe.yaml").is_file() and (folder / "stages").is_dir():
            return load_recipe(folder / "recipe.yaml").format.model_dump(mode="json")
    return None


def _speak(
    model: Any, tokenizer: Any, fmt: Format, problem: Problem, args: argparse.Namespace
) -> list[tuple[str, bool]]:
    """The samples as text, and whether each came to its own end."""
    import torch
    from transformers import GenerationConfig, StoppingCriteriaList

    from lemma.cli.stream import StopAfter, Words, ends_of
    from lemma.core.random import key
    from lemma.formats.encode import encode_prompt

    prompt_T = torch.from_numpy(encode_prompt(fmt, problem, tokenizer)).to(model.device)
    context = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    if len(prompt_T) >= context:
        raise UserError(f"the prompt has {len(prompt_T)} tokens but the model takes {context}", fix="ask less")
    ends = ends_of(model, tokenizer)
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.temperature else {}
    # Ours in place of the model's: penalties and cuts that come with a model would hide what it has learnt.
    model.generation_config = GenerationConfig(
        max_new_tokens=min(args.max_tokens, context - len(prompt_T)),
        num_return_sequences=args.samples,
        eos_token_id=sorted(ends),
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(key(args.seed, "generate"))
        ids_BT = model.generate(
            prompt_T[None],
            attention_mask=torch.ones_like(prompt_T[None]),
            stopping_criteria=StoppingCriteriaList([StopAfter(tokenizer, fmt.stop)]),
            streamer=Words(tokenizer, ends, sys.stdout) if _streams(args) else None,
        )
    return [_completion(row, ends, fmt.stop, tokenizer) for row in ids_BT[:, len(prompt_T) :].tolist()]


def _completion(row: list[int], ends: frozenset[int], stops: tuple[str, ...], tokenizer: Any) -> tuple[str, bool]:
    """The text up to its end, whatever padding follows, and whether it has one."""
    from lemma.engines.text import decode

    end = next((place for place, token in enumerate(row) if token in ends), len(row))
    text = decode(tokenizer, row[:end])
    for stop in stops:
        before, found, _ = text.partition(stop)
        if found:
            return before + stop, True
    return text, end < len(row)


def _print_answer(fmt: Format, text: str, whole: bool, max_tokens: int) -> None:
    from lemma.formats import FAULTS

    parsed = fmt.parse(text)
    if not whole:
        print(f"(cut off: no end within {max_tokens} tokens or the model's context)")
    if parsed.answer is not None:
        print(f"answer: {parsed.answer}")
    else:
        print(f"no answer in the format {fmt.name}: " + "; ".join(FAULTS[fault] for fault in parsed.faults))
