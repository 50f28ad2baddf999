"""Rows of data for people: as they are written, or as the tokens that a model learns from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from lemma.config.document import parse_value
from lemma.core.types import Demonstration, Preference, Problem, problem_of
from lemma.data.readers import Item
from lemma.formats import Format, make_format
from lemma.formats.encode import encode_prompt, warn_of_unknown_words
from lemma.formats.turns import encode_turns


def headed(item: Item, number: int, view: Callable[[Item], str]) -> str:
    """A row below the line that says what it is."""
    problem = problem_of(item)
    known: dict[str, Any] = {"subject": problem.subject, "level": problem.level, "gold": " or ".join(problem.golds)}
    known["varied from"] = problem.extra.get("varied_from")
    about = [f"{name} {value}" for name, value in known.items() if value]
    return f"--- row {number}: {' | '.join([problem.source, problem.id, *about])}\n{view(item)}"


def as_written(item: Item) -> str:
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


def in_format(name: str, model: str) -> Callable[[Item], str]:
    """A function that shows an item as the tokens of a model in a format, given as in a recipe."""
    from lemma.models.load_model import load_tokenizer

    fmt, tokenizer = make_format(parse_value(name)), load_tokenizer(model)
    fmt.install(tokenizer)
    return lambda item: _as_tokens(item, fmt, tokenizer)


def _as_tokens(item: Item, fmt: Format, tokenizer: Any) -> str:
    """The prompt, then each response to learn from in [[ ]], decoded from the ids that training would use."""

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
            start, learnt = int(path.loss_mask_T.argmax()), int(path.loss_mask_T.sum())
            if not shown or len(said) == 1:
                shown.append(text(path.ids_T[:start]))
            parts = _learnt_parts(path.loss_mask_T[start:])
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
