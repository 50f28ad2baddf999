"""What an evaluation would say if the format did not matter: the answer is looked for anywhere in a completion.

A completion in which the format finds an answer has the same verdict as always. Where it finds none, the grader looks
for one by itself, as `lemma grade` does. The difference between the two accuracies is what the format costs the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.results import ACCURACY, Report
from lemma.grading import GradingService, Rules

FEW = 0.1
"""Below this share of completions that keep the format, people are told."""
MOST = 0.5
"""Above this share of completions that are cut off, they are told that instead."""


def add_lenient(
    rows: Sequence[EvalRow],
    settings: Mapping[str, Any],
    service: GradingService,
    begun: Mapping[tuple[str, int, int], list[Any]] | None = None,
) -> None:
    """Give the rows of one benchmark, in order, their lenient verdicts. Those that are `begun` already, by benchmark,
    number of the problem and of the sample, are not asked for again."""
    if settings.get("scoring") in ACCURACY:
        return
    rules = Rules.model_validate(settings["rules"])
    asked: dict[int, list[Any]] = {}
    for place, row in enumerate(rows):
        if is_open(row):
            known = (begun or {}).get((row.benchmark, place // settings["k"], row.sample))
            asked[place] = ask(row, rules, service) if known is None else known
    for place, row in enumerate(rows):
        row.lenient = _verdict(row, asked.get(place))


def is_open(row: EvalRow) -> bool:
    """Whether the format leaves the answer to be found."""
    return row.extracted is None and row.verdict != "right" and bool(row.gold) and bool(row.completion.strip())


def ask(row: EvalRow, rules: Rules, service: GradingService) -> list[Any]:
    """Verdicts to come on the whole completion, one for each gold."""
    own = rules if row.tolerance is None else rules.model_copy(update={"absolute": row.tolerance})
    return [service.submit(row.completion, gold, own) for gold in row.gold]


def _verdict(row: EvalRow, asked: Sequence[Any] | None) -> str:
    if asked is None:
        return row.verdict
    return "right" if any(future.result().kind == "right" for future in asked) else row.verdict


def hints(report: Report) -> list[str]:
    """A sentence for each benchmark whose format is hardly ever kept, or costs more than noise."""
    sentences = []
    for name, summary in report.summaries.items():
        kept, lenient = summary.scores["format"].value, summary.scores.get("lenient")
        if lenient is not None and kept >= FEW and lenient.low > summary.accuracy.high:
            sentences.append(
                f"{name}: the accuracy is {summary.accuracy.value:.1%} with answers where the format "
                f"{report.settings[name]['format']['name']} has them, and {lenient.value:.1%} with answers found "
                "anywhere (lenient)"
            )
        if kept >= FEW or lenient is None or report.settings[name].get("scoring") in ACCURACY:
            continue
        cut = summary.scores["truncated"].value
        if cut > MOST:
            sentences.append(
                f"{name}: {cut:.0%} of the completions are cut off after {report.settings[name]['max_tokens']} tokens, "
                "so the accuracy says little about what the model knows; raise --max-tokens"
            )
            continue
        sentences.append(
            f"{name}: {kept:.0%} of the completions keep the format {report.settings[name]['format']['name']}, so the "
            f"accuracy says little about what the model knows; with answers found anywhere it is {lenient.value:.1%} "
            "(lenient); choose another --format, show examples with --shots 4, or teach the format first"
        )
    return sentences
