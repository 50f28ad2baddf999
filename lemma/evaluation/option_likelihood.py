"""Multiple choice by log-likelihood: no word is generated; the option that the model finds likeliest is its answer.

`acc` takes the largest sum of log-probabilities, `acc_norm` the largest sum divided by the option's characters, both as
lm-eval defines them. Log-probabilities come from the policy's own function, the one that it is trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lemma.core.errors import UserError
from lemma.core.ranks import rank, together, world_size
from lemma.core.types import Problem, Trajectory
from lemma.data.choices import LETTERS
from lemma.evaluation.benchmarks import Loaded
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.shots import Shots
from lemma.formats.encode import encode_text
from lemma.formats.format import adds_bos
from lemma.models.attention import NAME
from lemma.models.packing import TokenBatch, plan_packs

if TYPE_CHECKING:
    from lemma.models.policy import Policy

WORDING = "Question: {question}\nAnswer:"
TOKENS_AT_A_TIME = {"cuda": 16384, "cpu": 2048}
Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Weighed:
    """One question as text: what stands before the options, and what each would continue it with."""

    context: str
    continuations: tuple[str, ...]


def wording(loaded: Loaded, problem: Problem, shots: Shots | None = None) -> Weighed:
    """A question as it is weighed, solved examples in front."""
    parts = [_solved(loaded, one.problem) for one in (shots.of(problem) if shots else ())]
    return Weighed(
        "\n\n".join([*parts, _asked(loaded, problem)]), tuple(f" {one}" for one in _weighed(loaded, problem))
    )


def _asked(loaded: Loaded, problem: Problem) -> str:
    """The question up to where an option continues it."""
    question = problem.question.strip()
    if loaded.benchmark.weighs == "letter":
        lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, problem.choices, strict=False)]
        question = "\n".join([question, *lines])
    return (loaded.benchmark.wording or WORDING).replace("{question}", question)


def _weighed(loaded: Loaded, problem: Problem) -> tuple[str, ...]:
    letters = tuple(LETTERS[: len(problem.choices)])
    return letters if loaded.benchmark.weighs == "letter" else tuple(choice.strip() for choice in problem.choices)


def _solved(loaded: Loaded, problem: Problem) -> str:
    right = LETTERS.index(problem.golds[0])
    return f"{_asked(loaded, problem)} {_weighed(loaded, problem)[right]}"


def log_likelihoods(
    policy: Policy, questions: Sequence[Weighed], told: Told = lambda done, total: None
) -> list[list[float]]:
    """For each question, the sum of log-probabilities of each of its continuations.

    Ids are those of the whole text, cut where the context's own ids end. A text that is longer than the model's context
    loses its beginning. On several ranks each computes some of the packs, and all get all sums.
    """
    if getattr(policy.causal.config, "_attn_implementation", None) != NAME:
        raise UserError("only Lemma's own model code computes log-likelihoods", fix="leave `--engine transformers` out")
    if policy.is_split:
        raise UserError(
            "benchmarks that weigh the likelihood of options are not computed with `shard: weights`",
            fix="evaluate the final model with `lemma eval`",
        )
    lines: list[_Line] = []
    for place, question in enumerate(questions):
        own = [_encoded(question.context, continuation, policy) for continuation in question.continuations]
        lines += _shared(place, own) or [_Line(one, ((place, option),)) for option, one in enumerate(own)]
    trajectories = [line.trajectory for line in lines]
    packs = plan_packs(trajectories, TOKENS_AT_A_TIME.get(policy.device.type, 2048), "token")

    def own_part() -> dict[int, list[float]]:
        values: dict[int, list[float]] = {}
        for pack in packs[rank() :: world_size()]:
            batch = TokenBatch.build(trajectories, pack, policy.device)
            values |= zip(pack, _sums(policy, batch, [lines[index] for index in pack]), strict=True)
            told(min(len(values) * world_size(), len(lines)), len(lines))
        return values

    sums = [[0.0] * len(question.continuations) for question in questions]
    for part in together(own_part, "log-likelihoods"):
        for index, values in part.items():
            for (place, option), value in zip(lines[index].owners, values, strict=True):
                sums[place][option] = value
    return sums


@dataclass(frozen=True)
class _Line:
    """A sequence to compute, and which options of which question it scores. Options that differ in their last and
    only token (`lasts`) share one sequence: what comes before is the same."""

    trajectory: Trajectory
    owners: tuple[tuple[int, int], ...]
    lasts: tuple[int, ...] = ()


def _shared(place: int, own: Sequence[Trajectory]) -> list[_Line]:
    """One line for all options where each is a single token after the same ids; otherwise none."""
    first = own[0]
    if any(one.trained_tokens != 1 or not np.array_equal(one.ids_T[:-1], first.ids_T[:-1]) for one in own):
        return []
    owners = tuple((place, option) for option in range(len(own)))
    return [_Line(first, owners, tuple(int(one.ids_T[-1]) for one in own))]


@torch.no_grad()
def _sums(policy: Policy, batch: TokenBatch, lines: Sequence[_Line]) -> list[list[float]]:
    """For each sequence of a pack, the sum over its targets, or over each of the last tokens it stands for."""
    hidden_NH = policy.hidden(batch.ids_T, batch.positions_T, batch.segments)[batch.sources_N]
    targets = batch.ids_T[batch.targets_N].tolist()
    sequence_N = batch.sequence_N.tolist()
    rows, wanted, place_of = [], [], []
    for row, place in enumerate(sequence_N):
        for option, token in enumerate(lines[place].lasts or (targets[row],)):
            rows.append(row)
            wanted.append(token)
            place_of.append((place, option))
    device = policy.device
    logprobs, _ = policy.score(hidden_NH[torch.tensor(rows, device=device)], torch.tensor(wanted, device=device))
    sums = [[0.0] * len(line.owners) for line in lines]
    for (place, option), value in zip(place_of, logprobs.double().tolist(), strict=True):
        sums[place][option] += value
    return sums


def _encoded(context: str, continuation: str, policy: Policy) -> Trajectory:
    tokenizer: Any = policy.tokenizer
    if getattr(tokenizer, "bos_token", None) is not None and adds_bos(tokenizer):
        context = tokenizer.bos_token + context
    before = len(encode_text(context, tokenizer))
    ids = np.asarray(encode_text(context + continuation, tokenizer), dtype=np.int64)
    if before == 0 and tokenizer.eos_token_id is not None:
        ids, before = np.concatenate([[tokenizer.eos_token_id], ids]), 1
    lost = max(0, len(ids) - policy.context)
    ids, before = ids[lost:], max(1, before - lost)
    return Trajectory(ids_T=ids, loss_mask_T=np.arange(len(ids)) >= before)


def rows_of(loaded: Loaded, questions: Sequence[Weighed], sums: Sequence[Sequence[float]]) -> list[EvalRow]:
    """Samples as every evaluation writes them; the completion is the chosen option."""
    rows = []
    for problem, question, own in zip(loaded.problems, questions, sums, strict=True):
        lengths = [max(len(option.strip()), 1) for option in question.continuations]
        per_character = [value / length for value, length in zip(own, lengths, strict=True)]
        best, normalised = int(np.argmax(own)), int(np.argmax(per_character))
        right = LETTERS[best] in problem.golds
        rows.append(
            EvalRow(
                benchmark=loaded.name,
                problem=problem.id,
                sample=0,
                question=problem.question,
                prompt=question.context,
                completion=question.continuations[best].strip(),
                extracted=LETTERS[best],
                gold=list(problem.golds),
                verdict="right" if right else "wrong",
                reason="likeliest option",
                format_ok=True,
                faults=[],
                finish="stop",
                tokens=0,
                reasoning=None,
                subject=problem.subject,
                level=problem.level,
                options=[float(value) for value in own],
                normalised=LETTERS[normalised] in problem.golds,
            )
        )
    return rows
