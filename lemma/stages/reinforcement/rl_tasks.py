"""Prepares problems for a reinforcement stage: prompts and a teacher's traces as ids, and the maximum response
length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lemma.core.collector import loading
from lemma.core.errors import UserError
from lemma.core.events import counted
from lemma.core.types import Demonstration, Problem, problem_of
from lemma.data.choices import as_asked
from lemma.data.data_options import DataOptions, LengthOptions
from lemma.data.held_out import questions_of, split_share
from lemma.data.load_rows import filter_by_length, load_problems, load_rows, row_of
from lemma.data.readers import Item
from lemma.environments import EnvironmentOptions
from lemma.environments.openings import opened_all
from lemma.formats import Format
from lemma.formats.encode import encode_demonstration, encode_prompt
from lemma.formats.turns import first_asked, said_ids
from lemma.models.policy import Policy
from lemma.rollouts import Task
from lemma.runs.stage import Stage
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_problems import asked_first, gold_wanted, needs_columns, own_problems

Given = tuple[Item, Task]
"""A row, and the task that it gives."""


@loading()
def prepare_tasks(
    stage: Stage, options: ReinforcementOptions, fmt: Format, policy: Policy
) -> tuple[list[Task], int, list[Problem]]:
    """The tasks of the stage, the maximum number of tokens in a response, and the held-out problems."""
    given = _given(stage, options, fmt, policy.tokenizer)
    given, limit = filter_by_length(given, _lengths(given), options.data.prompt_length, stage.say)
    longest = max(_lengths(given)) if limit is None else limit
    max_tokens = options.rollout.max_tokens or policy.context - longest
    if max_tokens < 1:
        raise UserError(
            f"stage {stage.name}: prompts of {longest} tokens leave no room in the model's context of {policy.context}",
            fix="lower data.prompt_length.max_tokens, or write rollout.max_tokens",
        )
    room = policy.context - max_tokens
    kept = [one for one, length in zip(given, _lengths(given), strict=True) if length <= room]
    if not kept:
        raise UserError(
            f"stage {stage.name}: no prompt leaves {max_tokens} tokens of the model's context of {policy.context}",
            fix="lower rollout.max_tokens or data.prompt_length.max_tokens",
        )
    if options.rollout.min_tokens > max_tokens:
        raise UserError(
            f"stage {stage.name}: rollout.min_tokens is {options.rollout.min_tokens}, but prompts leave room for "
            f"{max_tokens} tokens",
            fix="lower rollout.min_tokens",
        )
    if len(kept) < len(given):
        stage.warn(f"{len(given) - len(kept)} of {len(given)} prompts are longer than {room} tokens and were left out")
    kept, held_out = _split(stage, options, kept, fmt, policy.tokenizer)
    return [task for _, task in kept], max_tokens, held_out


def _lengths(given: Sequence[Given]) -> list[int]:
    return [len(task.prompt) for _, task in given]


def opened(environment: EnvironmentOptions, problem: Problem, seed: int) -> Problem:
    """The problem as its environment opens it. If that fails, the stage stops before it starts."""
    return opened_all(environment, [problem], seed)[0]


def _opened_all(environment: EnvironmentOptions, items: Sequence[Item], seed: int) -> list[Problem]:
    asked = [asked_first(as_asked(item)) for item in items]
    return asked if environment.is_single_turn else opened_all(environment, asked, seed)


def _given(stage: Stage, options: ReinforcementOptions, fmt: Format, tokenizer: Any) -> list[Given]:
    """All rows of the stage's data with their tasks."""
    own, keep = own_problems(options), needs_columns(options)
    items: list[Item]
    if own is not None:
        items = list(own)
    elif options.algorithm.uses_traces or not options.environment.is_single_turn:
        items = load_rows(options.data, stage.seed, keep_columns=keep)
    else:
        items = list(load_problems(options.data, stage.seed, keep_columns=keep, wanted=gold_wanted(options)))
    if options.algorithm.uses_traces:
        return _with_traces(stage, options, fmt, tokenizer, items)
    problems = _opened_all(options.environment, items, stage.seed)
    counting = counted(problems, f"{stage.name}: tokenizing", len(problems))
    tasks = [Task(problem, encode_prompt(fmt, problem, tokenizer)) for problem in counting]
    return list(zip(items, tasks, strict=True))


def _split(
    stage: Stage, options: ReinforcementOptions, given: list[Given], fmt: Format, tokenizer: Any
) -> tuple[list[Given], list[Problem]]:
    """What is trained on, and the validation problems, as they are asked."""
    validation, environment = options.validation, options.environment
    held: list[Item] = []
    if validation.data is not None:
        held = _other_rows(stage, options, validation.data, fmt, tokenizer)
    elif validation.share:
        questions = questions_of([item for item, _ in given])
        stay, out = split_share(range(len(given)), validation.share, stage.seed, questions.__getitem__)
        held, given = [given[place][0] for place in out], [given[place] for place in stay]
    is_played = not environment.is_graded
    problems = [asked_first(item) if is_played else problem_of(item) for item in held]
    # Multiple-choice options are in the same order as in training.
    wants_gold = gold_wanted(options) is not None
    return given, [as_asked(one) for one in problems if one.golds or not wants_gold][: validation.count]


def _other_rows(
    stage: Stage, options: ReinforcementOptions, data: DataOptions, fmt: Format, tokenizer: Any
) -> list[Item]:
    """The rows of separate validation data whose prompt is within the limits of its prompt_length."""
    keep, wanted = needs_columns(options), gold_wanted(options)
    if not options.environment.is_graded:
        items = load_rows(data, stage.seed, keep_columns=keep)
    else:
        items = list(load_problems(data, stage.seed, keep_columns=keep, wanted=wanted))
    if data.prompt_length == LengthOptions():
        return items
    problems = _opened_all(options.environment, items, stage.seed)
    lengths = [len(encode_prompt(fmt, problem, tokenizer)) for problem in problems]
    return filter_by_length(items, lengths, data.prompt_length, stage.say)[0]


def _with_traces(
    stage: Stage, options: ReinforcementOptions, fmt: Format, tokenizer: Any, items: Sequence[Item]
) -> list[Given]:
    """Rows with the teacher's response, if there is one; it ends with the end-of-sequence token."""
    given: list[Given] = []
    for row in items:
        if isinstance(row, Problem) and row.traces:
            row = Demonstration(row, response=row.traces[0])
        item = as_asked(row)
        problem = problem_of(item)
        if not problem.golds and options.environment.is_single_turn and gold_wanted(options) is not None:
            continue
        # The trace continues the format's own prompt, whatever prompt its row was written for.
        shown = replace(item, prompt=None) if isinstance(item, Demonstration) else None
        if not options.environment.is_single_turn:
            given.append((row, _with_turns(stage, options, fmt, tokenizer, problem, shown)))
            continue
        prompt = encode_prompt(fmt, problem, tokenizer)
        trace = None
        if shown is not None:
            encoded = encode_demonstration(fmt, shown, tokenizer)
            trace = encoded.ids_T[encoded.loss_mask_T]
            if options.algorithm.needs_trace_probs:
                _check_probs(options, problem, len(trace))
        given.append((row, Task(problem, prompt, trace)))
    if not any(task.trace is not None for _, task in given):
        raise UserError(
            f"stage {stage.name}: no problem of its data has a teacher's trace, which {options.algorithm.name} needs",
            fix="use data with a `target` or a solution, or another algorithm",
        )
    if len(given) < len(items):
        stage.warn(f"{len(items) - len(given)} of {len(items)} rows have no answer to grade against and were left out")
    return given


def _with_turns(
    stage: Stage,
    options: ReinforcementOptions,
    fmt: Format,
    tokenizer: Any,
    problem: Problem,
    shown: Demonstration | None,
) -> Task:
    """An environment's problem with a teacher's text of each turn."""
    asked = opened(options.environment, problem if shown is None else first_asked(shown), stage.seed)
    prompt = encode_prompt(fmt, asked, tokenizer)
    if shown is None:
        return Task(asked, prompt)
    turns = tuple(said_ids(fmt, shown, tokenizer))
    if options.algorithm.needs_trace_probs:
        _check_probs(options, problem, sum(map(len, turns)))
    return Task(asked, prompt, np.concatenate(turns), turns)


def _check_probs(options: ReinforcementOptions, problem: Problem, tokens: int) -> None:
    """Refuse a trace without the teacher's probability of each of its tokens; that of the added end token may be
    absent."""
    probs = problem.extra.get("trace_probs")
    if probs is not None and tokens - 1 <= len(probs) <= tokens:
        return
    if probs is None:
        wrong = "this row has a teacher's trace without the teacher's probabilities (`trace_probs`)"
    else:
        wrong = (
            f"this row has {len(probs)} probabilities of the teacher for {tokens - 1} tokens of its trace and an end"
        )
    fix = "give one for each token that this tokenizer makes of the trace, or write `off_policy: {behaviour: one}`"
    row = row_of(options.data, problem)
    raise UserError(f"problem {problem.id}: {wrong}", fix=fix) if row is None else row.error(wrong, fix)


def digest_of(tasks: Sequence[Task], max_tokens: int) -> str:
    """A digest of a stage's training data: prompts, right answers and traces, in this order."""
    whole = hashlib.blake2b(str(max_tokens).encode(), digest_size=16)
    for task in tasks:
        whole.update(task.prompt.tobytes())
        whole.update("\x1f".join(task.problem.golds).encode())
        if task.trace is not None:
            whole.update(task.trace.tobytes())
            whole.update(np.asarray(task.problem.extra.get("trace_probs", ()), dtype=np.float64).tobytes())
    return whole.hexdigest()
