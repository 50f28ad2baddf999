"""The learning curve of a run as a table and a figure: held-out accuracy against steps and minutes.

    lemma train recipes/arithmetic_63m.yaml
    python -m benchmarks.learning_curve runs/arithmetic-63m grpo docs/results/learning-curve

Writes NAME.svg, NAME.csv and the run's report as NAME.html, and prints the table. Minutes are those of training since
the beginning of the run, the stages before included; evaluations and checkpoints are not counted.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lemma.cli import main as lemma

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 64, 28, 24, 76
INK, HELD_OUT, SAMPLED = "#333333", "#0b6e4f", "#b8c4bb"


@dataclass(frozen=True)
class Point:
    """Accuracy on held-out problems after some steps, with its 95% interval."""

    step: int
    minutes: float
    accuracy: float
    low: float
    high: float
    tokens: float


def read(run: Path, stage: str) -> tuple[list[Point], list[tuple[int, float]]]:
    """The evaluations of a stage, and after each step the share of right answers among the samples it learnt from."""
    points: list[Point] = []
    sampled: list[tuple[int, float]] = []
    seconds = _seconds_before(run, stage)
    for row in _rows(run):
        if row["stage"] != stage:
            continue
        if row["axis"] == "eval":
            found = {key.rpartition("/")[2]: value for key, value in row.items() if key.startswith("evaluation/")}
            points.append(
                Point(
                    row["step"],
                    seconds / 60,
                    found["answer_accuracy"],
                    found["answer_accuracy_low"],
                    found["answer_accuracy_high"],
                    found["tokens"],
                )
            )
        else:
            seconds += _trained(row["timings"])
            sampled.append((row["step"], row["right"]))
    return points, sampled


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _seconds_before(run: Path, stage: str) -> float:
    """What the stages before took; a row that stands for several steps has the seconds of all of them."""
    return sum(_trained(row["timings"]) for row in _rows(run) if row["stage"] != stage and row["axis"] == "train")


def _trained(timings: Mapping[str, float]) -> float:
    return timings["seconds"] - timings.get("checkpoint_seconds", 0.0) - timings.get("evaluate_seconds", 0.0)


# --- the figure ----------------------------------------------------------------------------------------------------


def figure(points: Sequence[Point], sampled: Sequence[tuple[int, float]], title: str) -> str:
    """Held-out accuracy with intervals, over the share of right samples; steps and minutes below."""
    last = max([point.step for point in points] + [step for step, _ in sampled])

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = [f'<text x="{LEFT}" y="16" font-size="13">{title}</text>']
    for tenth in range(0, 11, 2):
        height = y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" y1="{height:.1f}" x2="{WIDTH - RIGHT}" y2="{height:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{10 * tenth}%</text>')
    for point in points:
        place = f'x="{x(point.step):.1f}" text-anchor="middle"'
        parts.append(f'<text {place} y="{y(0) + 18:.1f}">{point.step}</text>')
        parts.append(f'<text {place} y="{y(0) + 34:.1f}" fill="#888888">{point.minutes:.1f}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">GRPO steps; minutes of training below</text>'
    )
    parts.append(_line([(x(step), y(share)) for step, share in sampled], SAMPLED, 1.0))
    for point in points:
        parts.append(
            f'<line x1="{x(point.step):.1f}" y1="{y(point.low):.1f}" x2="{x(point.step):.1f}" y2="{y(point.high):.1f}" '
            f'stroke="{HELD_OUT}" stroke-width="1.5"/>'
        )
        parts.append(f'<circle cx="{x(point.step):.1f}" cy="{y(point.accuracy):.1f}" r="3.5" fill="{HELD_OUT}"/>')
    parts.append(_line([(x(point.step), y(point.accuracy)) for point in points], HELD_OUT, 2.0))
    legend = x(last) - 8
    parts.append(f'<text x="{legend}" y="{y(0.10)}" text-anchor="end" fill="{HELD_OUT}">held out, greedy, 95%</text>')
    parts.append(f'<text x="{legend}" y="{y(0.04)}" text-anchor="end" fill="#8a9a8e">samples learnt from</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">\n<rect width="100%" height="100%" fill="white"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _line(places: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


# --- the numbers ---------------------------------------------------------------------------------------------------


def table(points: Sequence[Point]) -> str:
    lines = ["| step | minutes | held-out accuracy | 95% interval | tokens an answer |", "|---|---|---|---|---|"]
    for point in points:
        interval = f"{point.low:.1%} to {point.high:.1%}"
        lines.append(f"| {point.step} | {point.minutes:.2f} | {point.accuracy:.1%} | {interval} | {point.tokens:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("stage", help="the stage that was evaluated")
    parser.add_argument("name", type=Path, help="where to write, without suffix")
    parser.add_argument("--title", default="Held-out accuracy")
    parser.add_argument("--size", type=float, default=1.0, help="megabytes of the report (default: %(default)s)")
    arguments = parser.parse_args()
    points, sampled = read(arguments.run, arguments.stage)
    arguments.name.with_suffix(".svg").write_text(figure(points, sampled, arguments.title))
    with arguments.name.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(points[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)
    report = arguments.name.with_suffix(".html")
    lemma(["report", str(arguments.run), "--to", str(report), "--size", str(arguments.size)])
    print(table(points))


if __name__ == "__main__":
    main()
