"""`lemma generate MODEL "question"`: ask a model, see its words as they come, and the answer they contain."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.cli.parser import Parser, add_device, add_engine, add_ranks, say
from lemma.core.errors import UserError
from lemma.core.events import silent
from lemma.core.types import Message, Problem

if TYPE_CHECKING:
    from lemma.api.generate_call import Asker
    from lemma.engines.protocol import Completion, Request

DESCRIPTION = """\
Ask a model a question, a file of questions, or, on a terminal and without a question, talk with it. MODEL is a run
folder, an exported model, an adapter folder, any folder in the Hugging Face format, a GGUF file, or a hub name. The
format is the run's own; without a run it is the one whose chat template was saved with the tokenizer, else boxed for a
tokenizer that has a chat template and r1_zero for one that has none."""
FORGET = "/new"
MOST_TOGETHER = 1024


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("generate", help="ask a model a question", description=DESCRIPTION)
    parser.add_argument(
        "model", metavar="MODEL", help="a run, a model folder, an adapter folder, a GGUF file or a hub name"
    )
    parser.add_argument("question", metavar="QUESTION", nargs="?", help="what to ask; - reads it from standard input")
    parser.add_argument(
        "--file", metavar="FILE", help="questions: .txt, one a line, or .jsonl with question or messages"
    )
    parser.add_argument("--format", metavar="NAME", help="how the question is put and the answer is read")
    parser.add_argument("--system", metavar="TEXT", help="system message in place of the format's own; empty: none")
    parser.add_argument("--samples", metavar="N", type=int, default=1, help="how many answers (default: 1)")
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="0 takes the likeliest token (default: 0 for one sample, else 1)"
    )
    parser.add_argument("--top-p", metavar="P", type=float, default=1.0, help="nucleus sampling (default: 1)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=1024, help="longest answer (default: 1024)")
    parser.add_argument("--show-logprobs", action="store_true", help="print each token with its log-probability")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each answer")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="another seed, other samples (default: 0)")
    add_device(parser)
    add_engine(parser)
    add_ranks(parser, "questions of a --file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.cluster.rank_program import on_ranks

    _check(args)
    problems = _problems(args)
    work = partial(_generate, args, problems)
    return on_ranks(work, args.arguments, args.ranks, args.device, engine=args.engine, is_shared=False)


def _generate(args: argparse.Namespace, problems: list[Problem]) -> int:
    asker = _open(args, len(problems))
    if not problems:
        return _chat(asker, args)
    _answer(asker, problems, args)
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
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p is {args.top_p}", fix="write a number above 0 and up to 1")
    if args.file is not None and args.question is not None:
        raise UserError("there are both a question and a file of questions", fix="give one of them")
    if args.ranks is not None and args.ranks > 1 and args.file is None:
        raise UserError("one question cannot be shared out", fix="leave --ranks out, or write questions in a --file")


def _problems(args: argparse.Namespace) -> list[Problem]:
    """The questions to ask; none if this is to be a conversation."""
    if args.file is not None:
        from lemma.data.question_file import read_questions

        return read_questions(Path(args.file))
    if args.question is None:
        if not sys.stdin.isatty():
            raise UserError("there is no question", fix="write it after MODEL, or - to read it from standard input")
        if args.samples > 1:
            raise UserError("a conversation has one answer to each question", fix="remove --samples")
        if args.json:
            raise UserError("a conversation is not written as JSON", fix="write a question after MODEL, or --file")
        return []
    question = sys.stdin.read().strip() if args.question == "-" else args.question.strip()
    if not question:
        raise UserError("the question is empty", fix='write `lemma generate MODEL "What is 6 times 7?"`')
    return [Problem((Message("user", question),))]


def _open(args: argparse.Namespace, questions: int) -> Asker:
    from lemma.api.generate_call import Asker
    from lemma.core.ranks import is_leader
    from lemma.engines.engine_options import NativeOptions

    together = min(questions * args.samples, MOST_TOGETHER) or 1
    one_by_one = _streams(args) and sys.stdout.isatty()
    options = NativeOptions(sequences=together, burst=1 if one_by_one else None)
    sink = say if is_leader() else silent
    named = args.format or None
    asker = Asker.open(args.model, args.device, args.engine, args.seed, sink, named, args.system, options)
    asker.asked = 1  # the keys of a command's samples count from 1
    return asker


def _request(asker: Asker, problem: Problem, args: argparse.Namespace) -> Request:
    return asker.request(problem, args.temperature, args.top_p, args.max_tokens, args.samples)


def _streams(args: argparse.Namespace) -> bool:
    return bool(args.samples == 1 and args.file is None and not args.json)


def _answer(asker: Asker, problems: list[Problem], args: argparse.Namespace) -> None:
    """Print the answers in the order of the questions, each as soon as it and those before it are there; on several
    ranks, the first one prints when all are there."""
    from lemma.api.generate_call import sharded_completions

    requests = [_request(asker, problem, args) for problem in problems]
    asker.check_alike(requests)
    if _streams(args):
        _print_one(asker, _stream(asker, requests[0]), args, is_shown=True)
        return
    completions: dict[Any, list[Completion]] = {request.key: [] for request in requests}
    printed = 0
    for completion in sharded_completions(asker.engine, requests):
        completions[completion.key].append(completion)
        while printed < len(requests) and len(completions[requests[printed].key]) == args.samples:
            if args.file is not None and not args.json:
                print(f"=== question {printed + 1} of {len(problems)}: {problems[printed].question}")
            for sample in sorted(completions.pop(requests[printed].key), key=lambda c: c.sample):
                if args.json:
                    _print_json(asker, problems[printed], sample, args)
                    continue
                if args.samples > 1:
                    print(f"--- sample {sample.sample + 1} of {args.samples}")
                _print_one(asker, sample, args)
            printed += 1


def _stream(asker: Asker, request: Request) -> Completion:
    """One completion, printed while it is made, or at its end by an engine that does not tell its tokens."""
    from lemma.reporting.streamed_words import Words

    words = Words(asker.policy.tokenizer, asker.ends, sys.stdout)
    engine = asker.engine
    engine.submit(replace(request, stream=engine.streams_tokens))
    try:
        while not engine.finished:
            engine.work()
            while engine.streams_tokens and engine.new_tokens:
                words.hear(engine.new_tokens.popleft().ids)
    except BaseException:  # what was broken off is not the answer to the next question
        engine.drop([request.key])
        engine.new_tokens.clear()
        raise
    completion = engine.finished.popleft()
    if not engine.streams_tokens:
        words.hear(completion.ids)
    words.end()
    return completion


def _print_one(asker: Asker, completion: Completion, args: argparse.Namespace, is_shown: bool = False) -> None:
    from lemma.formats import FAULTS
    from lemma.reporting.streamed_words import token_lines

    fmt, text = asker.format, asker.text(completion)
    if not is_shown:
        print(text)
    if args.show_logprobs:
        print("\n".join(token_lines(completion, asker.policy.tokenizer)))
    parsed = fmt.parse(text)
    _print_cut(completion, args)
    if parsed.answer is not None:
        print(f"answer: {parsed.answer}")
    elif asker.is_format_chosen:
        others = [FAULTS[fault] for fault in parsed.faults if fault != "no_answer"]
        print(f"no answer in the format {fmt.name}" + (f": {'; '.join(others)}" if others else ""))


def _print_cut(completion: Completion, args: argparse.Namespace) -> None:
    if completion.finish == "stop":
        return
    count = len(completion.ids)
    why = "a larger --max-tokens allows more" if count >= args.max_tokens else "the model's context is full"
    print(f"(cut off after {count} tokens: {why})")


def _print_json(asker: Asker, problem: Problem, completion: Completion, args: argparse.Namespace) -> None:
    row = dict(vars(asker.answer(completion, problem)))
    numbers = {name: row.pop(name).tolist() for name in ("ids", "logprobs")}
    print(json.dumps(row | (numbers if args.show_logprobs else {}), ensure_ascii=False), flush=True)


def _chat(asker: Asker, args: argparse.Namespace) -> int:
    """Questions and answers until an empty line; Ctrl-C ends an answer, not the conversation."""
    print(f"Ask; an empty line ends the conversation, {FORGET} begins another.")
    turns: list[Message] = []
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return 0
        if not question:
            return 0
        if question == FORGET:
            turns.clear()
            continue
        turns.append(Message("user", question))
        try:
            completion = _stream(asker, _request(asker, Problem(tuple(turns)), args))
        except KeyboardInterrupt:
            turns.pop()
            print("\n(stopped)")
            continue
        except UserError as error:
            turns.pop()
            print(f"lemma: {error}; {FORGET} begins another conversation", file=sys.stderr)
            continue
        if args.show_logprobs:
            _print_one(asker, completion, args, is_shown=True)
        else:
            _print_cut(completion, args)
        turns.append(Message("assistant", asker.format.opening + asker.text(completion)))
