"""`lemma data show`, `prepare` and `check`: look at data as the model will, write it, compare it with benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.cli.parser import Parser, add_overrides
from lemma.core.errors import UserError
from lemma.data.readers import Item, problem_of

if TYPE_CHECKING:
    from lemma.core.types import Demonstration
    from lemma.data.data_options import DataOptions
    from lemma.formats import Format

SHOW = """\
Print rows of a source; of a mix, the share of each source and rows of each. SOURCE may be a recipe (.yaml): the data of
each of its stages. Without SOURCE, a mix is given with --set 'mix=[{source: gsm8k, count: 100}, ...]'. With --format
rows are shown as the model will see them: the prompt, then what is learnt between [[ and ]], decoded from the
tokens."""
PREPARE = """\
Write data files. The ending of the name decides the kind: .parquet, .jsonl, .jsonl.gz, .json, .csv."""
LUFFY = """\
Write LUFFY's three files: openr1.parquet (problems with a teacher's trace), openrlhf_sft/train.jsonl (the same for
supervised learning) and openr1.complement.parquet (other problems, for SFT followed by RL). Without a source, its own
datasets are taken from the hub."""

CHECK = """\
Find rows that repeat problems of benchmarks, word for word or in most of their words, and how many problems of each
benchmark are affected. SOURCE may be a recipe (.yaml): its stages' data against the benchmarks they evaluate on."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("data", help="look at data and prepare it", description="Look at data, prepare it.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="what", required=True)
    show = commands.add_parser("show", help="print rows", description=SHOW)
    _add_source(show, default="those of a mix")
    show.add_argument(
        "--format", metavar="NAME", help="show rows in this format, such as r1_zero or {name: r1_zero, system: Think.}"
    )
    show.add_argument("--model", metavar="PATH", default="tiny", help="whose tokenizer to use (default: tiny)")
    show.add_argument("-n", "--limit", dest="n", metavar="N", type=int, default=3, help="how many rows (default: 3)")
    show.set_defaults(run=run_show)
    prepare = commands.add_parser("prepare", help="write data files", description=PREPARE)
    kinds = prepare.add_subparsers(title="what to write", metavar="KIND", dest="kind", required=True)
    rows = kinds.add_parser("rows", help="all rows of a source, in Lemma's own columns", description=PREPARE)
    _add_source(rows)
    rows.add_argument("--to", metavar="FILE", type=Path, required=True, help="the file to write")
    rows.set_defaults(run=run_rows)
    correct = kinds.add_parser("correct", help="only rows whose response gives the right answer", description=PREPARE)
    _add_source(correct)
    correct.add_argument("--to", metavar="FILE", type=Path, required=True, help="the file to write")
    correct.add_argument("--format", metavar="NAME", help="only rows that also keep this format, such as r1_zero")
    correct.set_defaults(run=run_correct)
    luffy = kinds.add_parser("luffy", help="LUFFY's three files", description=LUFFY)
    _add_source(luffy, default="openr1_math")
    luffy.add_argument("--to", metavar="DIR", type=Path, default=Path("data"), help="the folder (default: data)")
    luffy.add_argument("--complement", metavar="SOURCE", help="where the problems of the third file come from")
    luffy.add_argument(
        "--hold-out", metavar="SHARE", type=float, default=0.5, help="or a share of the source (default: 0.5)"
    )
    luffy.set_defaults(run=run_luffy)
    check = commands.add_parser("check", help="find rows that repeat benchmark problems", description=CHECK)
    _add_source(check)
    check.add_argument("--against", metavar="A,B", help="benchmarks: names, data files, hub datasets")
    check.add_argument("--data-dir", metavar="DIR", help="folder with the benchmarks' files in place of the hub")
    check.add_argument("--show", metavar="N", type=int, default=3, help="how many pairs to print (default: 3)")
    check.add_argument("--clean", metavar="FILE", type=Path, help="write the rows that repeat nothing")
    check.set_defaults(run=run_check)


def _add_source(parser: Parser, default: str | None = None) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?" if default else None,
        help="a file, a folder, a hub dataset, or arithmetic" + (f" (default: {default})" if default else ""),
    )
    parser.add_argument("--reader", metavar="NAME", help="how rows are read (default: by their columns)")
    parser.add_argument("--split", metavar="NAME", help="split of a hub dataset, a folder or arithmetic")
    parser.add_argument("--config", metavar="NAME", help="configuration of a hub dataset")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="for what is drawn at random (default: 0)")
    add_overrides(
        parser, "any option of the data of a recipe, such as count=100 or arithmetic.operations=4; may be repeated"
    )


def _options(args: argparse.Namespace, source: str | None = None) -> DataOptions:
    from pydantic import ValidationError

    from lemma.config.document import Document, Place
    from lemma.config.explain import explain
    from lemma.config.overrides import apply
    from lemma.data.data_options import DataOptions

    given = {name: getattr(args, name) for name in ("reader", "split", "config") if getattr(args, name) is not None}
    document = Document("", {"source": source or args.source, **given}, {(): Place("command line")})
    apply(document, args.overrides, DataOptions)
    try:
        return DataOptions.model_validate(document.data)
    except ValidationError as error:
        raise explain(error, DataOptions, document) from None


def run_check(args: argparse.Namespace) -> int:
    from lemma.cli.check import check_recipe, check_source

    if args.show < 0:
        raise UserError(f"--show {args.show} is below 0", fix="write 0 or more")
    if args.source.endswith((".yaml", ".yml")):
        from lemma.recipe import load_recipe

        return check_recipe(load_recipe(args.source, args.overrides), args)
    return check_source(_options(args), args)


def run_rows(args: argparse.Namespace) -> int:
    from lemma.data.load_rows import load_rows
    from lemma.data.prepared import item_rows, write_rows

    items = load_rows(_options(args), args.seed)
    write_rows(args.to, item_rows(items))
    print(f"{args.to}: {len(items):,} rows")
    return 0


def run_correct(args: argparse.Namespace) -> int:
    from lemma.data.load_rows import load_demonstrations
    from lemma.data.prepared import correct_only, item_rows, write_rows

    items = load_demonstrations(_options(args), args.seed)
    kept = correct_only(items, _gives_answer if args.format is None else _in_format_and_right(args.format))
    if not kept:
        right = len(correct_only(items, _gives_answer)) if args.format is not None else 0
        if right:
            raise UserError(
                f"{right:,} of the {len(items):,} responses are right, but none keeps the format {args.format}",
                fix="leave --format out, or name the format they are written in",
            )
        raise UserError(f"none of the {len(items):,} responses gives the right answer", fix="check the source")
    write_rows(args.to, item_rows(kept))
    print(f"{args.to}: {len(kept):,} of {len(items):,} rows, those whose response gives the right answer")
    return 0


def _gives_answer(response: str, golds: Sequence[str]) -> bool:
    from lemma.grading import grade

    return any(grade(response, gold).right for gold in golds)


def _in_format_and_right(name: str) -> Callable[[str, Sequence[str]], bool]:
    fmt = _format(name)

    def check(response: str, golds: Sequence[str]) -> bool:
        parsed = fmt.parse(response.removeprefix(fmt.opening))
        return parsed.ok and _gives_answer(parsed.answer or "", golds)

    return check


def _format(name: str) -> Format:
    """A format by its name, or by its name and options in the notation of a recipe."""
    from lemma.config.document import parse_value
    from lemma.formats import make_format

    return make_format(parse_value(name))


def run_luffy(args: argparse.Namespace) -> int:
    from lemma.data.choices import as_asked
    from lemma.data.held_out import split_share
    from lemma.data.load_rows import load_rows
    from lemma.data.prepared import luffy_rows, write_luffy
    from lemma.formats.think_boxed import ThinkBoxed

    source = args.source or "openr1_math"
    complement = args.complement or (None if args.source else "openr1_math_complement")
    if complement is None and not 0 < args.hold_out < 1:
        raise UserError(f"--hold-out {args.hold_out} is not a share", fix="write a number between 0 and 1")
    training = load_rows(_options(args, source), args.seed)
    if complement is not None:
        others = load_rows(_options(args, complement), args.seed)
    else:
        training, others = split_share(training, args.hold_out, args.seed)
    fmt = ThinkBoxed()

    def rows(items: Sequence[Any]) -> list[dict[str, Any]]:
        return luffy_rows([as_asked(item) for item in items], fmt.default_system, _think_target, args.split or "train")

    counts = write_luffy(args.to, rows(training), rows(others))
    for name, count in counts.items():
        print(f"{args.to / name}: {count:,} rows")
    return 0


def _think_target(item: Demonstration) -> str:
    """A teacher's response with its thoughts in think tags, as LUFFY's prompt expects them."""
    from lemma.formats.think_boxed import ThinkBoxed

    fmt = ThinkBoxed()
    if item.response is not None and "</think>" in item.response:
        return fmt.opening + item.response.removeprefix(fmt.opening)
    thoughts, answer = item.response or item.reasoning or "", item.answer or item.problem.gold
    assert answer is not None, "rows without an answer are refused before"
    return fmt.opening + fmt.compose(thoughts.strip(), answer)


def run_show(args: argparse.Namespace) -> int:
    if args.n < 1:
        raise UserError(f"-n {args.n} shows nothing", fix="write a number from 1")
    view = _as_written if args.format is None else _in_format(args.format, args.model)
    if args.source is None or not args.source.endswith((".yaml", ".yml")):
        options = _options(args, args.source or "arithmetic")
        if args.source is None and not options.mix:
            raise UserError("there is nothing to show", fix="name a source or a recipe, or give --set mix=[...]")
        _show(options, args, view)
        return 0
    from lemma.data.data_options import journal_place
    from lemma.recipe import load_recipe

    for name, stage in load_recipe(args.source, args.overrides).stages.items():
        data = getattr(stage, "data", None)
        if data is None or data.source == "environment" or journal_place(data.source) is not None:
            print(f"=== stage {name}: its rows are made while it runs\n")
            continue
        print(f"=== stage {name}\n")
        _show(data, args, view)
    return 0


def _show(options: DataOptions, args: argparse.Namespace, view: Callable[[Item], str]) -> None:
    """Rows of the only source; of a mix, the share of each source before rows of each."""
    from lemma.data.load_rows import first_items, load_rows, rows_by_source

    if options.mix:
        parts = rows_by_source(options, args.seed)
        whole = sum(len(items) for _, items in parts)
        for place, (source, items) in enumerate(parts, start=1):
            share = f"{len(items):,} of {whole:,} rows ({len(items) / max(1, whole):.1%})"
            print(f"--- source {place} of {len(parts)}: {source.source}, {share}\n")
            _print_rows(items[: args.n], args, view)
        return
    if options.source == "arithmetic":
        options = options.model_copy(update={"count": args.n, "fraction": None})
    is_whole = options.source == "arithmetic" or options.count is not None or options.fraction
    items = load_rows(options, args.seed) if is_whole else first_items(options, args.n, args.seed)
    _print_rows(items[: args.n], args, view)


def _print_rows(items: Sequence[Item], args: argparse.Namespace, view: Callable[[Item], str]) -> None:
    from lemma.data.choices import as_asked

    for number, row in enumerate(items, start=1):
        item = row if args.format is None else as_asked(row)
        problem = problem_of(item)
        known: dict[str, Any] = {"subject": problem.subject, "level": problem.level, "gold": " or ".join(problem.golds)}
        known["varied from"] = problem.extra.get("varied_from")
        about = [f"{name} {value}" for name, value in known.items() if value]
        print(f"--- row {number}: {' | '.join([problem.source, problem.id, *about])}\n{view(item)}\n")


def _as_written(item: Item) -> str:
    """An item without any format: who says what, and which part of it is what."""
    problem = problem_of(item)
    is_text = getattr(item, "prompt", None) == ""
    parts = [(message.role, _said(message)) for message in problem.messages if not is_text]
    parts += [(f"choice {'ABCDEFGHIJKLMNOPQRSTUVWXYZ'[n]}", text) for n, text in enumerate(problem.choices)]
    for name in ("prompt", "reasoning", "answer", "response", "chosen", "rejected", "wanted"):
        value = getattr(item, name, None)
        if value is not None and not (is_text and name == "prompt"):
            parts.append(("text" if is_text else name, str(value)))
    return "\n".join(f"{name}: {text}" for name, text in parts)


def _said(message: Any) -> str:
    calls = message.more.get("tool_calls")
    return f"{message.content} calls {calls}".strip() if calls else message.content


def _in_format(name: str, model: str) -> Callable[[Item], str]:
    """A function that shows an item as the tokens of a model in a format."""
    from lemma.models.load_model import load_tokenizer

    fmt, tokenizer = _format(name), load_tokenizer(model)
    fmt.install(tokenizer)
    return lambda item: _as_tokens(item, fmt, tokenizer)


def _as_tokens(item: Item, fmt: Format, tokenizer: Any) -> str:
    """The prompt, then each response to learn from in [[ ]], decoded from the ids that training would use."""
    from lemma.core.types import Demonstration, Preference, Problem
    from lemma.formats.encode import encode_prompt, warn_of_unknown_words
    from lemma.formats.turns import encode_turns

    def text(ids: Any) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    warn_of_unknown_words(problem_of(item), tokenizer)
    if isinstance(item, Problem):
        ids = encode_prompt(fmt, item, tokenizer)
        return f"{text(ids)}\n({len(ids)} tokens)"
    if isinstance(item, Demonstration):
        said = {"learnt": item}
    elif isinstance(item, Preference):
        answers = {"chosen": item.chosen, "rejected": item.rejected}
        said = {name: Demonstration(item.problem, response=answer) for name, answer in answers.items()}
    else:
        said = {"wanted" if item.wanted else "unwanted": Demonstration(item.problem, response=item.response)}
    shown: list[str] = []
    for name, demonstration in said.items():
        for path in encode_turns(fmt, demonstration, tokenizer):
            start, learnt = int(path.chosen_T.argmax()), int(path.chosen_T.sum())
            if not shown or len(said) == 1:
                shown.append(text(path.ids_T[:start]))
            parts = _learnt_parts(path.chosen_T[start:])
            brackets = "".join(
                f"[[{text(path.ids_T[start + a : start + b])}]]"
                if is_learnt
                else text(path.ids_T[start + a : start + b])
                for a, b, is_learnt in parts
            )
            shown.append(f"{brackets}\n({len(path) - learnt} tokens of prompt, {learnt} {name})")
    return "\n".join(shown) if len(said) > 1 else "".join(shown)


def _learnt_parts(chosen: Any) -> list[tuple[int, int, bool]]:
    """Runs of tokens that are all learnt or all not: begin, end, which."""
    borders = [0, *(place for place in range(1, len(chosen)) if chosen[place] != chosen[place - 1]), len(chosen)]
    return [(a, b, bool(chosen[a])) for a, b in pairwise(borders)]
