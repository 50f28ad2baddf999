"""Reward functions as TRL takes them: whole batches in lists, columns of the data by name, a list of numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from lemma.core.async_calls import result_of
from lemma.core.errors import UserError
from lemma.rewards.custom import TRL_ARGUMENTS, FunctionReward, load_function, number_of, parameters_of
from lemma.rewards.reward import WrongReturn
from lemma.rewards.reward_input import RewardInput

ROW = "row"
GOLD_COLUMNS = ("answer", "solution", "ground_truth", "target")
"""Common names of the right answer's column; a problem without such a column passes its gold answer."""


class TrlFunction(FunctionReward):
    """A reward function written for TRL: it gets prompts, completions and the columns of the data, and returns a
    list."""

    name: Literal["trl"] = "trl"
    """Which reward."""
    completions: Literal["auto", "text", "messages"] = "auto"
    """What the function gets: texts, or lists of one message each. auto: as TRL does, messages if the data's `prompt`
    column holds messages, texts if it holds text; without that column, messages if the format uses a chat template."""

    needs_columns: ClassVar[bool] = True
    """Problems keep the row that they came from."""

    def check(self) -> None:
        wanted = parameters_of(load_function(self.function))
        if TRL_ARGUMENTS.isdisjoint(wanted) and not any(one.kind is one.VAR_KEYWORD for one in wanted.values()):
            file, line = self.place
            raise UserError(
                f"reward '{self.label}' takes neither prompts nor completions, as functions for TRL must",
                file=file,
                line=line,
                fix=f"write `{self.function}` without `trl:` where it takes one RewardInput",
            )

    def score_all(self, items: Sequence[RewardInput]) -> list[float | None]:
        if not items:
            return []
        function, given = load_function(self.function), self._arguments(items)
        found = result_of(function(**given), self.seconds * len(items))
        return [number_of(value) for value in listed(found, len(items))]

    def _arguments(self, items: Sequence[RewardInput]) -> dict[str, Any]:
        """The columns that the function takes: all of them with `**kwargs`, otherwise those that it names."""
        as_messages = self.completions == "messages" or (self.completions == "auto" and _is_conversation(items[0]))
        known: dict[str, Any] = _columns(items)
        known["prompts"] = [_prompt(item, as_messages) for item in items]
        known["completions"] = [
            [{"role": "assistant", "content": item.completion}] if as_messages else item.completion for item in items
        ]
        known["completion_ids"] = [list(item.ids) for item in items]
        known |= {"trainer_state": None, **self.options}
        wanted = parameters_of(load_function(self.function)).values()
        lacking = [one.name for one in wanted if one.kind not in _LOOSE and one.default is one.empty]
        lacking = [name for name in lacking if name not in known]
        if lacking:
            file, line = self.place
            columns = ", ".join(sorted(set(known) - {"trainer_state"}))
            raise UserError(
                f"reward '{self.label}' asks for '{lacking[0]}', which no column is called (there are: {columns})",
                file=file,
                line=line,
                fix=f"write `data.columns: {{{lacking[0]}: NAME}}`, or give it under the reward's `options`",
            )
        if any(one.kind is one.VAR_KEYWORD for one in wanted):
            return known
        return {one.name: known[one.name] for one in wanted if one.name in known}


_LOOSE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def _is_conversation(item: RewardInput) -> bool:
    from lemma.formats.chat import ChatFormat

    prompt = item.problem.extra.get(ROW, {}).get("prompt")
    if prompt is not None:
        return not isinstance(prompt, str)
    return isinstance(item.format, ChatFormat)


def _prompt(item: RewardInput, as_messages: bool) -> Any:
    return [message.as_dict() for message in item.problem.messages] if as_messages else item.problem.question


def _columns(items: Sequence[RewardInput]) -> dict[str, Any]:
    """The columns of the rows, each a list over the batch; null where a row lacks one."""
    rows = [_row(item) for item in items]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _row(item: RewardInput) -> dict[str, Any]:
    gold = item.problem.gold
    known = {} if gold is None else dict.fromkeys(GOLD_COLUMNS, gold)
    return {**known, "question": item.problem.question, **item.problem.extra.get(ROW, {})}


def listed(scores: Any, count: int) -> list[Any]:
    """A function's result for a batch as a list, one entry per completion."""
    values = list(scores) if isinstance(scores, Iterable) and not isinstance(scores, str | bytes | Mapping) else None
    if values is None or len(values) != count:
        given = f"{len(values)} value{'' if len(values) == 1 else 's'}" if values is not None else f"{scores!r:.200}"
        raise WrongReturn(
            f"returned {given} for {count} completions, beginning", f"return a list of {count} numbers, one for each"
        )
    return values
