"""What the demo shows at its end: the accuracy of each stage's model, and what made the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from lemma.core.events import Said, Sink
from lemma.core.files import read_json_lines
from lemma.data.data_options import ArithmeticOptions
from lemma.evaluation.benchmarks import Benchmark
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.metrics import Score, Summary
from lemma.evaluation.paired import paired_test
from lemma.evaluation.results import Report
from lemma.formats import Format
from lemma.reporting.console import duration

if TYPE_CHECKING:
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions

HELD_OUT = 500
SHOWN = 3
WIDTH = 100
# Stages in the order of the table. The last is the fair comparison: SFT for as long as GRPO takes.
LABELS = {"sft": "SFT", "grpo": "SFT, then GRPO", "sft_longer": "SFT, then more SFT"}
TEMPERATURES = {"greedy": 0.0, "temperature-1": 1.0}


@dataclass(frozen=True)
class DemoScore:
    """The model of one stage: its two evaluations on the same problems, and its training time."""

    stage: str
    greedy: Report
    sampled: Report
    seconds: float

    @property
    def label(self) -> str:
        return LABELS[self.stage]


def held_out(arithmetic: ArithmeticOptions) -> Benchmark:
    """Problems of the test split: no training problem, nor another wording of one, is among them."""
    return Benchmark(
        name="held-out",
        source="arithmetic",
        arithmetic=arithmetic.model_copy(update={"count": HELD_OUT, "seed": 0}),
    )


def measure(run_dir: Path, fmt: Format, options: ReinforcementOptions, seed: int, sink: Sink) -> list[DemoScore]:
    """Evaluate the final model of every stage, greedily and at temperature 1; what was measured before is read."""
    return [_measure(stage, run_dir, fmt, options, seed, sink) for stage in LABELS]


def _measure(stage: str, run_dir: Path, fmt: Format, options: ReinforcementOptions, seed: int, sink: Sink) -> DemoScore:
    from lemma.engines import open_engine
    from lemma.evaluation.evaluator import EvalSettings, evaluate
    from lemma.grading import default_service

    model, tokens = str(run_dir / "stages" / stage / "final"), options.rollout.max_tokens
    assert tokens is not None, "the demo's recipe limits its samples"
    sink(Said(f"measuring {LABELS[stage]} on {HELD_OUT} held-out problems, greedily and at temperature 1"))
    policy, engine = open_engine(model, "cpu", seed, sink)
    reports: dict[str, Report] = {}
    try:
        for name, temperature in TEMPERATURES.items():
            reports[name] = evaluate(
                engine,
                policy,
                [held_out(options.data.arithmetic)],
                EvalSettings(samples=1, temperature=temperature, max_tokens=tokens, seed=seed, format=fmt),
                run_dir / "evaluations" / f"{stage}-{name}",
                model=model,
                rewards=options.rewards,
                service=default_service(),
                sink=sink,
            )
    finally:
        engine.close()
    return DemoScore(stage, reports["greedy"], reports["temperature-1"], _seconds(run_dir, stage))


def _seconds(run_dir: Path, stage: str) -> float:
    """Wall time of a stage's steps on this machine, from its rows of metrics."""
    rows = read_json_lines(run_dir / "metrics.jsonl")
    return sum(row["timings"].get("seconds", 0.0) for row in rows if row["stage"] == stage)


# --- in words ----------------------------------------------------------------------------------------------------


def table(scores: Sequence[DemoScore]) -> str:
    """Markdown, with columns that line up in a terminal too."""
    head = ["model", "greedy, % right", "temperature 1, % right", "format kept, %", "reward", "trained for"]
    lines = [
        [
            one.label,
            _percent(_accuracy(one.greedy)),
            _percent(_accuracy(one.sampled)),
            f"{100 * _summary(one.sampled).scores['format'].value:.1f}",
            f"{_summary(one.sampled).numbers['reward']:.3f}",
            duration(one.seconds) if one.stage == "sft" else f"+ {duration(one.seconds)}",
        ]
        for one in scores
    ]
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    rows = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [head, *lines]]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {rows[0]} |", f"|{rule}|", *(f"| {row} |" for row in rows[1:])])


def samples(before: DemoScore, after: DemoScore, count: int = SHOWN) -> str:
    """The first held-out problems, not chosen, with the greedy answers of two models."""
    lines = []
    for old, new in list(zip(_rows(before.greedy), _rows(after.greedy), strict=True))[:count]:
        lines.append(f"Q: {old.question}")
        for label, row in ((before.label, old), (after.label, new)):
            mark = "right" if row.verdict == "right" else f"wrong, it is {row.gold[0]}"
            lines.append(f"  {label}: {row.completion.strip()}   [{mark}]")
        lines.append("")
    return "\n".join(lines).rstrip()


@dataclass(frozen=True)
class Styles:
    """How answers were written: what share one step at a time, and how often each way was right."""

    share: float
    right_stepwise: float | None
    right_terse: float | None

    @classmethod
    def of(cls, rows: Sequence[EvalRow]) -> Styles:
        stepwise = [row for row in rows if is_stepwise(row.reasoning)]
        terse = [row for row in rows if not is_stepwise(row.reasoning)]
        return cls(len(stepwise) / len(rows), _right(stepwise), _right(terse))


def is_stepwise(reasoning: str | None) -> bool:
    """Whether a solution writes running totals down, and not only the last one."""
    return reasoning is not None and reasoning.count("=") > 1


def explanation(scores: Sequence[DemoScore]) -> str:
    """What reinforcement learning did, and what it did not, in the numbers of this run."""
    by_stage = {one.stage: one for one in scores}
    sft, grpo, longer = (by_stage[stage] for stage in ("sft", "grpo", "sft_longer"))
    before, after, control = (Styles.of(_rows(one.sampled)) for one in (sft, grpo, longer))
    gain, more = (_change(sft.greedy, one.greedy) for one in (grpo, longer))
    return (
        "What GRPO did. It was told only whether answers are right, and it saw no new solution: it made the model "
        "prefer a way of working that SFT had taught it. The demonstrations are of two kinds: 60% do the whole sum in "
        f"one line, 40% write down every step. Sampled after SFT, {before.share:.0%} of the answers write steps down; "
        f"of those {_share(before.right_stepwise)} are right, of the others {_share(before.right_terse)}. After GRPO "
        f"{after.share:.0%} write steps down, and {_share(after.right_stepwise)} of those are right. "
        f"{_parts(before, after)} Greedily, GRPO changed accuracy by {gain} in {duration(grpo.seconds)}. "
        f"More SFT, with new demonstrations and for {duration(longer.seconds)}, changed it by {more}: "
        f"imitation keeps the mixture ({control.share:.0%} write steps down). Were all demonstrations worked out step "
        "by step, SFT alone would do; GRPO found out which of them are worth imitating."
    )


def _parts(before: Styles, after: Styles) -> str:
    """The gain at temperature 1, as the part that the choice of style makes at unchanged accuracies, and the rest."""
    if before.right_stepwise is None or before.right_terse is None:
        return "Before, every answer was written in the same way."
    whole = 100 * (_mix(after) - _mix(before))
    choice = 100 * (after.share - before.share) * (before.right_stepwise - before.right_terse)
    return (
        f"Of {whole:+.1f} points at temperature 1, {choice:+.1f} come from choosing that way more often, and "
        f"{whole - choice:+.1f} from {'fewer' if whole >= choice else 'more'} slips."
    )


def _mix(styles: Styles) -> float:
    return styles.share * (styles.right_stepwise or 0.0) + (1 - styles.share) * (styles.right_terse or 0.0)


def question(scores: Sequence[DemoScore]) -> str:
    """A held-out problem to try the model with."""
    return _rows(scores[0].greedy)[0].question


def as_markdown(scores: Sequence[DemoScore], seed: int) -> str:
    """The whole result as a page."""
    by_stage = {one.stage: one for one in scores}
    return "\n".join(
        [
            f"# The demo, seed {seed}",
            "",
            table(scores),
            "",
            fill(
                f"{_summary(scores[0].greedy).n} held-out problems, one sample each; in brackets 95% intervals (exact "
                "binomial). Format and reward are those of samples at temperature 1.",
                WIDTH,
            ),
            "",
            fill(explanation(scores), WIDTH),
            "",
            "The first held-out problems, answered greedily:",
            "",
            "```",
            samples(by_stage["sft"], by_stage["grpo"]),
            "```",
            "",
        ]
    )


def _summary(report: Report) -> Summary:
    (summary,) = report.summaries.values()
    return summary


def _rows(report: Report) -> list[EvalRow]:
    (rows,) = report.rows.values()
    return rows


def _accuracy(report: Report) -> Score:
    return _summary(report).accuracy


def _change(before: Report, after: Report) -> str:
    """How many points an accuracy changed by, problem by problem, with the 95% interval."""
    right = ([[float(row.verdict == "right")] for row in _rows(report)] for report in (before, after))
    test = paired_test(*right)
    return f"{100 * test.difference:+.1f} points (95% interval {100 * test.low:+.1f} to {100 * test.high:+.1f})"


def _right(rows: Sequence[EvalRow]) -> float | None:
    return sum(row.verdict == "right" for row in rows) / len(rows) if rows else None


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


def _percent(score: Score) -> str:
    return f"{100 * score.value:.1f} ({100 * score.low:.1f} to {100 * score.high:.1f})"
