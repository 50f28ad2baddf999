"""Prepares problems for a reinforcement stage: prompts and a teacher's traces as ids, and the maximum response
length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, Problem
from lemma.data.choices import as_asked
from lemma.data.load_rows import filter_by_length, load_problems, load_rows, row_of, split_share
from lemma.data.readers import Item, problem_of
from lemma.environments import EnvironmentOptions
from lemma.environments.openings import opened_all
from lemma.evaluation.in_environment import is_scored_by
from lemma.formats import Format
from lemma.formats.encode import encode_demonstration, encode_prompt
from lemma.formats.played import first_asked, said_ids
from lemma.models.policy import Policy
from lemma.rollouts import Task
from lemma.runs.stage import Stage
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_problems import asked_first, needs_columns, own_problems


def prepare_tasks(
    stage: Stage, options: ReinforcementOptions, fmt: Format, policy: Policy
) -> tuple[list[Task], int, list[Problem]]:
    """The tasks of the stage, the maximum number of tokens in a response, and the held-out problems."""
    items, held_out = _items(stage, options)
    if options.algorithm.uses_traces:
        tasks = _with_traces(stage, options, fmt, policy.tokenizer, items)
    else:
        problems = opened_all(options.environment, [asked_first(as_asked(item)) for item in items], stage.seed)
        tasks = [Task(problem, encode_prompt(fmt, problem, policy.tokenizer)) for problem in problems]
    lengths = [len(task.prompt) for task in tasks]
    tasks, limit = filter_by_length(tasks, lengths, options.data.prompt_length, stage.say)
    longest = max(len(task.prompt) for task in tasks) if limit is None else limit
    max_tokens = options.rollout.max_tokens or policy.context - longest
    if max_tokens < 1:
        raise UserError(
            f"stage {stage.name}: prompts of {longest} tokens leave no room in the model's context of {policy.context}",
            fix="lower data.prompt_length.max_tokens, or write rollout.max_tokens",
        )
    room = policy.context - max_tokens
    kept = [task for task in tasks if len(task.prompt) <= room]
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
    if len(kept) < len(tasks):
        stage.warn(f"{len(tasks) - len(kept)} of {len(tasks)} prompts are longer than {room} tokens and were left out")
    return kept, max_tokens, held_out


def opened(environment: EnvironmentOptions, problem: Problem, seed: int) -> Problem:
    """The problem as its environment opens it. If that fails, the stage stops before it starts."""
    return opened_all(environment, [problem], seed)[0]


def _items(stage: Stage, options: ReinforcementOptions) -> tuple[list[Item], list[Problem]]:
    """The training items, and the validation problems, as they are asked."""
    validation = options.validation
    items: list[Item]
    own, keep = own_problems(options), needs_columns(options)
    if own is not None:
        items = list(own)
    elif options.algorithm.uses_traces or not options.environment.is_single_turn:
        items = load_rows(options.data, stage.seed, keep_columns=keep)
    else:
        items = list(load_problems(options.data, stage.seed, keep_columns=keep))
    held_out: list[Problem] = []
    if validation.data is not None:
        if is_scored_by(options.environment):
            rows = load_rows(validation.data, stage.seed, keep_columns=keep)
            held_out = [asked_first(row) for row in rows]
        else:
            held_out = load_problems(validation.data, stage.seed, keep_columns=keep)
    elif validation.share:
        items, held = split_share(items, validation.share, stage.seed, stage.name)
        if is_scored_by(options.environment):
            held_out = [asked_first(item) for item in held]
        else:
            held_out = [problem for problem in map(problem_of, held) if problem.golds]
    # Multiple-choice options are in the same order as in training.
    return items, [as_asked(problem) for problem in held_out[: validation.count]]


def _with_traces(
    stage: Stage, options: ReinforcementOptions, fmt: Format, tokenizer: Any, items: Sequence[Item]
) -> list[Task]:
    """Problems with the teacher's response, if there is one; it ends with the end-of-sequence token."""
    tasks: list[Task] = []
    for row in items:
        if isinstance(row, Problem) and row.traces:
            row = Demonstration(row, response=row.traces[0])
        item = as_asked(row)
        problem = problem_of(item)
        if not problem.golds and options.environment.is_single_turn:
            continue
        # The trace continues the format's own prompt, whatever prompt its row was written for.
        shown = replace(item, prompt=None) if isinstance(item, Demonstration) else None
        if not options.environment.is_single_turn:
            tasks.append(_with_turns(stage, options, fmt, tokenizer, problem, shown))
            continue
        prompt = encode_prompt(fmt, problem, tokenizer)
        trace = None
        if shown is not None:
            encoded = encode_demonstration(fmt, shown, tokenizer)
            trace = encoded.ids_T[encoded.chosen_T]
            if options.algorithm.needs_trace_probs:
                _check_probs(options, problem, len(trace))
        tasks.append(Task(problem, prompt, trace))
    if not any(task.trace is not None for task in tasks):
        raise UserError(
            f"stage {stage.name}: no problem of its data has a teacher's trace, which {options.algorithm.name} needs",
            fix="use data with a `target` or a solution, or another algorithm",
        )
    if len(tasks) < len(items):
        stage.warn(f"{len(items) - len(tasks)} of {len(items)} rows have no answer to grade against and were left out")
    return tasks


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
