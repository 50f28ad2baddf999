"""Verdicts on saved samples, without the model: by Lemma's grader again, or by the graders of other systems."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.eval_settings import OURS, check_graders, grader_version
from lemma.evaluation.lenient import add_lenient
from lemma.evaluation.results import (
    ACCURACY,
    Report,
    alone_in,
    claim,
    make_report,
    read_report,
    read_settings,
    write_report,
    write_settings,
)
from lemma.formats import make_format, read_answer
from lemma.grading import GradingService, Rules


def regrade(
    rows: Sequence[EvalRow],
    settings: Mapping[str, Any],
    graders: str,
    service: GradingService,
    graded: Callable[[], None] = lambda: None,
) -> list[EvalRow]:
    """The rows of one benchmark with new verdicts. Thoughts that never end are wrong by every grader. `graded` is
    called after each row.

    Rewards follow from Lemma's verdicts: they are left out where another grader was asked, or where a verdict changed.
    """
    names = check_graders(graders)
    if settings.get("scoring") in ACCURACY:
        return list(rows)
    fmt, rules = make_format(settings["format"]), Rules.model_validate(settings["rules"])
    parsed = [read_answer(fmt, row.completion, row.finish, rules) for row in rows]
    unfinished = [one.answer is None and "missing_think_end" in one.faults for one in parsed]

    def ours(row: EvalRow, answer: str | None) -> tuple[str, str]:
        if not row.gold or answer is None:
            return ("wrong", "no_answer") if row.gold else ("unknown", "no_gold")
        own = rules if row.tolerance is None else rules.model_copy(update={"absolute": row.tolerance})
        verdicts = [service.grade(answer, gold, own) for gold in row.gold]
        return best((verdict.kind, verdict.reason) for verdict in verdicts)

    def judge(place: int) -> tuple[str, str]:
        row = rows[place]
        if unfinished[place]:
            return "wrong", "no_answer"
        return best(
            ours(row, parsed[place].answer) if name == OURS else by_other(name, row.completion, row.gold, service)
            for name in names
        )

    regraded = []
    with ThreadPoolExecutor(max_workers=max(2, 2 * service.workers)) as pool:
        for (verdict, reason), row, one in zip(pool.map(judge, range(len(rows))), rows, parsed, strict=True):
            regraded.append(
                replace(
                    row, verdict=verdict, reason=reason, extracted=one.answer, reasoning=one.reasoning,
                    format_ok=one.ok, faults=list(one.faults),
                )
            )  # fmt: skip
            graded()
    if names != [OURS] or any(new.verdict != old.verdict for new, old in zip(regraded, rows, strict=True)):
        return [replace(row, reward=None) for row in regraded]
    return regraded


def best(verdicts: Iterable[tuple[str, str]]) -> tuple[str, str]:
    return min(verdicts, key=lambda verdict: ("right", "wrong", "unknown").index(verdict[0]))


def by_other(name: str, completion: str, golds: Sequence[str], service: GradingService) -> tuple[str, str]:
    """The verdict of another system's grader on the whole completion, word for word as that system would ask it.

    Of several gold answers, any counts: each is asked alone, because some graders take only one.
    """
    if not golds:
        return "unknown", "no_gold"
    return best(_compat_one(name, completion, gold, service) for gold in golds)


def _compat_one(name: str, completion: str, gold: str, service: GradingService) -> tuple[str, str]:
    try:
        score = service.compat(name, completion, gold)
    except RuntimeError:
        return "unknown", f"{name} failed"
    if isinstance(score, dict):
        score = score["reward"]
    elif isinstance(score, list | tuple):
        score = score[1]
    if score is None:
        return "unknown", name
    return ("right" if float(score) >= 1 else "wrong"), name


def rescore(
    folder: Path,
    graders: str,
    out: Path | None = None,
    *,
    service: GradingService | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Report, Report, Path]:
    """Grade a finished evaluation again: the report before, the report now, and the folder that holds it."""
    check_graders(graders)
    before = read_report(folder)
    settings = read_settings(folder)
    assert settings is not None
    played = [name for name, own in settings["benchmarks"].items() if own.get("scoring") == "environment"]
    if played:
        raise UserError(
            f"the verdicts on {played[0]} are those of an environment, and no grader gives others",
            fix="evaluate again in another folder",
        )
    target = out or folder / f"rescored-{graders.replace(',', '+')}"
    if target.resolve() == folder.resolve():
        raise UserError("the rescored results would replace the evaluation", fix="write --to and another folder")
    changed = copy.deepcopy(settings)
    for own in changed["benchmarks"].values():
        own["grader"] = f"{graders} {grader_version()}"
    claim(target, changed, any_grader=True)
    with alone_in(target):
        with nullcontext(service) if service is not None else GradingService() as used:
            done, rows = count(1), {}
            is_graded = {name: own.get("scoring") not in ACCURACY for name, own in before.settings.items()}
            total = sum(len(own) for name, own in before.rows.items() if is_graded[name])
            for name, own in before.rows.items():
                rows[name] = regrade(own, before.settings[name], graders, used, lambda: told(next(done), total))
                add_lenient(rows[name], before.settings[name], used)
            after = make_report(changed["model"], changed["benchmarks"], rows)
        # Without this file, a kill between the others leaves an evaluation that is not complete.
        (target / "results.json").unlink(missing_ok=True)
        write_settings(target, changed)
        write_report(target, after)
    return before, after, target
