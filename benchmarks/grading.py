"""Lemma's grader and math-verify: accuracy on the same labelled cases, then verdicts per second. One core, caches off.

    python benchmarks/grading.py [CASES.jsonl]

Cases are rows {"prediction", "gold", "match", "kind"}; by default `shared/data/grader/dev.jsonl` next to the checkout.
Prints the tables and writes them to benchmarks/results/grading.md.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from lemma.grading import GradingService, evaluate, expression, normal_form, structure, symbolic, tokens
from lemma.grading.quick import quick
from lemma.grading.symbolic import grade_here, warm_up

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "grading.md"
Judge = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Score:
    """How one grader did on the cases."""

    name: str
    cases: int
    false_positives: int
    false_negatives: int
    seconds: list[float]

    @property
    def accuracy(self) -> float:
        return 1 - (self.false_positives + self.false_negatives) / self.cases

    def row(self) -> str:
        return (
            f"| {self.name} | {self.accuracy:.1%} | {self.false_positives} | {self.false_negatives} |"
            f" {statistics.median(self.seconds) * 1e3:.2f} | {statistics.mean(self.seconds) * 1e3:.2f} |"
            f" {max(self.seconds):.2f} |"
        )


def clear_caches() -> None:
    """Empty every cache of the exact path and of sympy's parser."""
    exact = (normal_form.normalise, normal_form.words, tokens.tokenise, expression.read, structure.shape)
    for function in (*exact, evaluate.symbols, evaluate.contains, evaluate.point, symbolic._parse):
        function.cache_clear()


def by_lemma(case: dict[str, Any]) -> bool:
    return grade_here(case["prediction"], case["gold"]).right


def by_math_verify(case: dict[str, Any]) -> bool:
    """parse and verify, gold first; text without delimiters is put into a box, as its documentation advises."""
    from math_verify import parse, verify

    return bool(verify(parse(_boxed(case["gold"])), parse(_boxed(case["prediction"], case["kind"]))))


def _boxed(text: str, kind: str = "") -> str:
    return text if "$" in text or "\\boxed" in text or kind == "full_completion" else f"\\boxed{{{text}}}"


def judge(name: str, grader: Judge, cases: list[dict[str, Any]]) -> Score:
    wrong, missed, seconds = 0, 0, []
    for case in cases:
        clear_caches()
        start = perf_counter()
        right = grader(case)
        seconds.append(perf_counter() - start)
        wrong += right and not case["match"]
        missed += case["match"] and not right
    return Score(name, len(cases), wrong, missed, seconds)


WORK = "We add the two numbers and check the sum again, step by step, as before. " * 20
SHAPES: dict[str, str] = {
    "a box": WORK + "The final answer is $\\boxed{{{}}}$.",
    "a box after thinking": "<think>" + WORK + "</think> Thus \\boxed{{{}}}",
    "answer tags": WORK + "</think> <answer> {} </answer>",
    "####": WORK + "\n#### {}",
}


def pairs(shape: str, count: int) -> list[tuple[str, str]]:
    """Distinct completions of about 1.5k characters with whole-number golds, two thirds of them right."""
    return [(SHAPES[shape].format(n), str(n if n % 3 else n + 1)) for n in range(count)]


def rate(work: Callable[[list[tuple[str, str]]], Any], items: list[tuple[str, str]]) -> float:
    """The best of three rounds: other load on the machine can only make it slower."""
    best = 0.0
    for _ in range(3):
        start = perf_counter()
        work(items)
        best = max(best, len(items) / (perf_counter() - start))
    return best


def throughput(count: int = 50_000) -> list[str]:
    rows = []
    with GradingService() as service:
        for shape in SHAPES:
            items = pairs(shape, count)
            here = rate(lambda batch: [quick(*pair) for pair in batch], items)
            there = rate(service.grade_many, items)
            rows.append(f"| {shape} | {len(items[0][0]):,} | {here:,.0f} | {there:,.0f} |")
    return rows


def report(cases: list[dict[str, Any]], source: str) -> str:
    logging.disable(logging.CRITICAL)
    warm_up()
    by_math_verify(cases[0])
    ours, theirs = judge("Lemma", by_lemma, cases), judge("math-verify", by_math_verify, cases)
    median = statistics.median(theirs.seconds) / statistics.median(ours.seconds)
    mean = statistics.mean(theirs.seconds) / statistics.mean(ours.seconds)
    packages = ", ".join(f"{name} {version(name)}" for name in ("math-verify", "latex2sympy2-extended", "sympy"))
    python = f"Python {sys.version.split()[0]}"
    return "\n".join(
        [
            "# Grading beside math-verify",
            "",
            f"{date.today().isoformat()}; {os.cpu_count()} CPU cores, one used; {python}; {packages}.",
            f"{len(cases)} labelled cases ({source}), the same run, caches off, everything in this process.",
            "",
            "| grader | accuracy | false positives | false negatives | median ms | mean ms | max s |",
            "|---|---|---|---|---|---|---|",
            ours.row(),
            theirs.row(),
            "",
            f"Lemma takes 1/{median:.0f} of math-verify's time in the median and 1/{mean:.0f} in the mean.",
            "",
            "Verdicts a second on whole-number golds, distinct completions, no cache, best of three rounds.",
            "Such verdicts are exact, so the service gives them in the caller's process; only answers that need",
            "sympy cross to a worker:",
            "",
            "| answer in | characters | in process | through the service |",
            "|---|---|---|---|",
            *throughput(),
            "",
        ]
    )


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data" / "grader" / "dev.jsonl"
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    text = report(cases, path.name)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
