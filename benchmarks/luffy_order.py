"""LUFFY compared with its baselines on problems that the starting policy hardly ever solves, over several seeds.

    python -m benchmarks.luffy_order --jobs 12                                  all rows, then the table
    python -m benchmarks.luffy_order --row '{"system": "luffy", "seed": 1}'     one row, in this process, on one thread
    python -m benchmarks.luffy_order --table                                    the table of the rows that are there

Every row is a run of `lemma.runs.run.train` on the built-in model and problems. The four systems of a seed begin
from the same model. It learnt from solutions that write few of the steps, and every step only where the question asks
how; so it can calculate, but does not where nobody asks. RL and the tests never ask. The teacher's traces write every
step:

    luffy         one trace in each group of eight, shaped by p / (p + 0.1)
    on_policy     eight samples of its own, no trace
    rl_sft_loss   seven samples of its own, and the trace is imitated
    sft_rl        imitates the traces of other problems first, as many as luffy sees; then on_policy

A row may change any value of `Settings`, for example `{"system": "luffy", "seed": 1, "rl_steps": 20}`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from lemma.evaluation.intervals import mean_interval
from lemma.evaluation.paired import t_quantile

Row = dict[str, Any]

START = "start"
SYSTEMS = ("luffy", "on_policy", "rl_sft_loss", "sft_rl")
SEEDS = (1, 2, 3)
RESULTS = Path("benchmarks/results/luffy_order.jsonl")
FORMAT = {"name": "r1_zero", "preamble": False}
GROUP = 8
SAMPLES = 2
MOST_DEMONSTRATIONS = 40_000
# Student's 97.5% quantile with two degrees of freedom, for which the expansion in `t_quantile` is 1% too small.
STUDENT_OF_THREE = 4.3027


@dataclass(frozen=True)
class Settings:
    """Settings that the rows share."""

    operations: int = 16
    largest: int = 99
    hidden: int = 128
    layers: int = 2
    written: float = 0.1
    """Share of the running totals that the start's solutions write where nobody asks how."""
    asked_how: float = 0.5
    sft_steps: int = 2400
    sft_lr: float = 2e-3
    sft_sequences: int = 32
    problems: int = 16
    mini_batches: int = 2
    rl_steps: int = 40
    rl_lr: float = 1e-4
    rl_warmup: int = 10
    """Updates over which the rate rises: without it the first ones, in which AdamW moves every weight by the whole
    rate, lose most of what the start had learnt."""
    trace_epochs: int = 3
    trace_lr: float = 2e-4
    device: str = "auto"
    """A GPU where there is one; on a CPU each row runs on one thread."""
    tested: int = 300
    every: int = 0
    """Steps between greedy evaluations on the way; 0: none."""

    @property
    def trace_tokens(self) -> int:
        """Maximum tokens of a response: a worked step takes six, the tags and the end a few."""
        return 6 * self.operations + 12


OF_THE_START = ("operations", "largest", "hidden", "layers", "written", "asked_how", "sft_steps", "sft_lr",
                "sft_sequences", "device")  # fmt: skip


# --- recipes -----------------------------------------------------------------------------------------------------


def problems(settings: Settings, count: int, seed: int) -> Row:
    """Problems of the training split with worked solutions; another seed, other problems."""
    values = {"operations": settings.operations, "largest": settings.largest, "style": "stepwise"}
    return {"source": "arithmetic", "arithmetic": values | {"count": count, "seed": seed}}


def start_stage(settings: Settings, seed: int) -> Row:
    """The model imitates solutions that skip most steps, and such as write all of them where the question asks how."""
    data = problems(settings, min(settings.sft_steps * settings.sft_sequences, MOST_DEMONSTRATIONS), 100 * seed)
    data["arithmetic"] |= {"style": "skipping", "written": settings.written, "asked_how": settings.asked_how}
    return {
        "kind": "supervised",
        "data": data,
        "steps": settings.sft_steps,
        "batch": {"sequences": settings.sft_sequences},
        "optim": {"lr": settings.sft_lr, "schedule": "linear", "warmup": 30},
        "checkpoint": {"every": 0},
        "log_every": 50,
    }


def trace_stage(settings: Settings, seed: int) -> Row:
    """Imitation of as many traces as luffy sees, of other problems than RL takes."""
    count = settings.rl_steps * settings.problems
    return {
        "kind": "supervised",
        "data": problems(settings, count, 100 * seed + 2),
        "epochs": settings.trace_epochs,
        "batch": {"sequences": settings.sft_sequences},
        "optim": {"lr": settings.trace_lr, "schedule": "cosine", "final_lr": 0.1, "warmup": 0.1},
        "checkpoint": {"every": 0},
        "log_every": 10,
    }


def algorithm(system: str, mini_batches: int) -> Row:
    """The settings of the published scripts, as in recipes/luffy*.yaml."""
    common = {"name": "luffy", "group_size": GROUP, "mini_batches": mini_batches, "scale": "none", "entropy": 0.0}
    own: dict[str, Row] = {
        "luffy": {"prefix": {"samples": 1}, "off_policy": {"reshape": "p_div_p", "gamma": 0.1}, "clip": None},
        "on_policy": {"prefix": {"samples": 0}, "clip": 0.2},
        "rl_sft_loss": {"prefix": {"samples": 1}, "sft_weight": 1.0, "statistics": "on_policy", "clip": None},
    }
    return common | own["on_policy" if system == "sft_rl" else system]


def rl_stage(settings: Settings, system: str, seed: int) -> Row:
    stage = {
        "kind": "rl",
        "algorithm": algorithm(system, settings.mini_batches),
        "data": problems(settings, settings.rl_steps * settings.problems, 100 * seed + 1),
        "rewards": ["accuracy"],
        "rollout": {"temperature": 1.0, "max_tokens": settings.trace_tokens},
        "batch": {"problems": settings.problems},
        "steps": settings.rl_steps,
        "optim": {"lr": settings.rl_lr, "warmup": settings.rl_warmup, "betas": [0.9, 0.999], "weight_decay": 0.01},
        "checkpoint": {"every": 0},
    }
    if settings.every:
        test = problems(settings, 100, 0) | {"name": "way", "split": "validation"}
        stage["eval"] = {"benchmarks": [test], "every": settings.every, "max_tokens": settings.trace_tokens}
    return stage


def recipe_of(settings: Settings, system: str, seed: int, runs: Path) -> Row:
    """The recipe of a row, as it would stand in a file."""
    model: Row = {"path": "tiny", "tiny": {"hidden": settings.hidden, "layers": settings.layers}}
    if system == START:
        stages = {"sft": start_stage(settings, seed)}
    else:
        model = {"path": str(start_folder(settings, seed, runs) / "stages" / "sft" / "final")}
        stages = {"traces": trace_stage(settings, seed)} if system == "sft_rl" else {}
        stages["rl"] = rl_stage(settings, system, seed)
    folder = str(run_folder(settings, system, seed, runs))
    run = {"dir": folder, "seed": seed, "device": settings.device, "threads": 1, "tensorboard": False}
    return {"run": run, "model": model, "format": FORMAT, "stages": stages}


# --- one row -------------------------------------------------------------------------------------------------------


def start_folder(settings: Settings, seed: int, runs: Path) -> Path:
    """Runs that share a start share its settings, whatever comes later."""
    return runs / f"start-{seed}-{_name({name: getattr(settings, name) for name in OF_THE_START})}"


def run_folder(settings: Settings, system: str, seed: int, runs: Path) -> Path:
    if system == START:
        return start_folder(settings, seed, runs)
    return runs / f"{system}-{seed}-{_name(asdict(settings))}"


def _name(values: Mapping[str, Any]) -> str:
    from lemma.core.types import content_id

    return content_id(dict(values))[:8]


def run_row(row: Row, runs: Path) -> Row:
    """Train what the row says, from a start that is trained first where it is not there; measure it."""
    import torch

    from lemma.core.events import silent
    from lemma.runs.run import train

    torch.set_num_threads(1)
    settings, system, seed = settings_of(row), row["system"], row["seed"]
    if system not in (START, *SYSTEMS):
        raise SystemExit(f"there is no system '{system}'; write one of: {', '.join((START, *SYSTEMS))}")
    begin, cpu = time.perf_counter(), time.process_time()
    spent: dict[str, float] = {}
    for name in dict.fromkeys((START, system)):
        recipe = _recipe(recipe_of(settings, name, seed, runs))
        clock = time.process_time()
        train(recipe, sink=silent)
        spent[name] = time.process_time() - clock
    folder = run_folder(settings, system, seed, runs)
    result = row | measure(folder, settings) | {"rewards": rewards_on_the_way(folder)}
    result["cpu_seconds"] = {name: round(value, 1) for name, value in spent.items()}
    return result | {
        "cpu_total": round(time.process_time() - cpu, 1),
        "seconds": round(time.perf_counter() - begin, 1),
        "settings": asdict(settings),
    }


def settings_of(row: Mapping[str, Any]) -> Settings:
    known = {field.name for field in fields(Settings)}
    unknown = set(row) - known - {"system", "seed"}
    if unknown:
        raise SystemExit(f"a row has no '{sorted(unknown)[0]}'; write one of: {', '.join(sorted(known))}")
    return Settings(**{name: value for name, value in row.items() if name in known})


def _recipe(values: Row) -> Any:
    from lemma.recipe import Recipe

    return Recipe.model_validate(values)


def measure(folder: Path, settings: Settings) -> Row:
    """Right answers on the test split, greedily, at temperature 1, and greedily where the question asks how: of each
    problem how many samples are right."""
    from lemma.engines import open_engine

    last = "rl" if (folder / "stages" / "rl").is_dir() else "sft"
    model = str(folder / "stages" / last / "final")
    policy, engine = open_engine(model, settings.device, 0)
    try:
        greedy = _evaluate(policy, engine, settings, folder / f"greedy-{settings.tested}", model, 0.0, 1)
        sampled = _evaluate(policy, engine, settings, folder / f"sampled-{settings.tested}", model, 1.0, SAMPLES)
        asked = _evaluate(policy, engine, settings, folder / f"asked-{settings.tested}", model, 0.0, 1, asked_how=1.0)
    finally:
        engine.close()
    return {"greedy": greedy, "sampled": sampled, "asked": asked}


def _evaluate(
    policy: Any, engine: Any, settings: Settings, folder: Path, model: str, temperature: float, samples: int,
    asked_how: float = 0.0,
) -> Row:  # fmt: skip
    from lemma.evaluation.evaluator import EvalSettings, evaluate

    test = problems(settings, settings.tested, 0) | {"name": "test", "split": "test"}
    test["arithmetic"] |= {"asked_how": asked_how}
    how = EvalSettings(samples=samples, temperature=temperature, max_tokens=settings.trace_tokens, format=FORMAT)
    report = evaluate(engine, policy, [test], how, folder, model=model)
    rows = report.rows["test"]
    right = [sum(row.verdict == "right" for row in rows[i : i + samples]) for i in range(0, len(rows), samples)]
    written = [row.completion.count(";") / (settings.operations - 1) for row in rows]
    return {
        "accuracy": round(sum(right) / len(rows), 4),
        "format": round(float(np.mean([row.format_ok for row in rows])), 4),
        "written": round(float(np.mean(written)), 3),
        "right": "".join(map(str, right)),
    }


def rewards_on_the_way(folder: Path) -> list[float]:
    """Share of right answers among the policy's own samples, in each tenth of the RL steps."""
    found: list[float] = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["stage"] == "rl" and entry["axis"] == "train":
            found.append(entry["right"])
    return [round(float(part.mean()), 3) for part in np.array_split(np.array(found), 10) if len(part)]


# --- all rows ------------------------------------------------------------------------------------------------------


def run_all(rows: Sequence[Row], runs: Path, jobs: int, limit: float, out: Path) -> None:
    """The starts first, then the systems, `jobs` processes at a time; each result is written when it is ready."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("")
    starts = {start_folder(settings_of(row), row["seed"], runs): row | {"system": START} for row in rows}
    for part in (list(starts.values()), [row for row in rows if row["system"] != START]):
        with ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(_in_a_process, row, runs, limit) for row in part]
            for done in as_completed(running):
                with out.open("a") as file:
                    file.write(json.dumps(done.result()) + "\n")
                print(short(done.result()), flush=True)


def _in_a_process(row: Row, runs: Path, limit: float) -> Row:
    command = [sys.executable, "-m", "benchmarks.luffy_order", "--row", json.dumps(row), "--runs", str(runs)]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False, env=os.environ | one_thread
        )
    except subprocess.TimeoutExpired:
        return row | {"error": f"longer than {limit:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return row | {"error": " | ".join(lines[-4:])[-800:]}


def short(result: Row) -> str:
    head = f"{result['system']:>12} seed {result['seed']}"
    if "error" in result:
        return f"{head}: {result['error']}"
    one, many = result["greedy"], result["sampled"]
    return (
        f"{head}: greedy {one['accuracy']:.1%} (steps written {one['written']:.0%}), at temperature 1 "
        f"{many['accuracy']:.1%} (format {many['format']:.0%}), asked how {result['asked']['accuracy']:.1%}, "
        f"{result['seconds']:.0f} s, rewards {result['rewards']}"
    )


# --- the table -----------------------------------------------------------------------------------------------------


def table(results: Sequence[Row]) -> str:
    """Systems by the mean over seeds of their greedy accuracy, the start last."""
    found = {system: [one for one in results if one["system"] == system and "error" not in one]
             for system in (START, *SYSTEMS)}  # fmt: skip
    ranked = sorted((name for name in SYSTEMS if found[name]), key=lambda name: -_mean_of(found[name], "greedy"))
    seeds = sorted({one["seed"] for one in results})
    lines = [
        f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | greedy, mean | over problems | over seeds "
        "| temperature 1, mean | over problems | over seeds | steps written |",
        "|---" * (len(seeds) + 8) + "|",
    ]
    for name in [*ranked, *([START] if found[START] else [])]:
        lines.append(_line(name, found[name], seeds))
    return "\n".join(lines) + "\n"


def _line(name: str, rows: Sequence[Row], seeds: Sequence[int]) -> str:
    cells = [name]
    for seed in seeds:
        own = [row["greedy"] for row in rows if row["seed"] == seed]
        cells.append(f"{own[0]['accuracy']:.1%} {_within(_scores(own, 1))}" if own else "")
    for kind, samples in (("greedy", 1), ("sampled", SAMPLES)):
        own = [row[kind] for row in rows]
        cells += [f"{_mean_of(rows, kind):.1%}", _within(_scores(own, samples)), over_seeds(own)]
    cells.append(f"{np.mean([row['sampled']['written'] for row in rows]):.0%}")
    return f"| {' | '.join(cells)} |"


def _mean_of(rows: Sequence[Row], kind: str) -> float:
    return float(np.mean([row[kind]["accuracy"] for row in rows]))


def _scores(measured: Sequence[Row], samples: int) -> np.ndarray:
    """Of each problem the share of right samples over all seeds, which share their test problems."""
    return np.mean([[int(digit) / samples for digit in one["right"]] for one in measured], axis=0)


def _within(scores: np.ndarray) -> str:
    low, high, _ = mean_interval(scores)
    return f"[{low:.1%}, {high:.1%}]"


def over_seeds(measured: Sequence[Row]) -> str:
    """Student's interval of the mean over seeds, cut to what an accuracy can be."""
    values = np.array([one["accuracy"] for one in measured])
    if len(values) < 2:
        return ""
    quantile = STUDENT_OF_THREE if len(values) == 3 else t_quantile(0.975, len(values) - 1)
    reach = quantile * float(values.std(ddof=1)) / len(values) ** 0.5
    return f"[{max(0.0, values.mean() - reach):.1%}, {min(1.0, values.mean() + reach):.1%}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", help="one row, as JSON")
    parser.add_argument("--rows", help="several rows, as a JSON list")
    parser.add_argument("--common", default="{}", help="values of `Settings` for all rows, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds a row may take")
    parser.add_argument("--runs", type=Path, default=Path("runs/luffy_order"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the results, one JSON object a line")
    parser.add_argument("--table", action="store_true", help="only print the table of the results that are there")
    arguments = parser.parse_args()
    if arguments.row:
        sys.stdout, screen = sys.stderr, sys.stdout
        print(json.dumps(run_row(json.loads(arguments.row), arguments.runs)), file=screen)
        return
    if not arguments.table:
        rows = [{"system": system, "seed": seed} for seed in SEEDS for system in SYSTEMS]
        rows = json.loads(arguments.rows) if arguments.rows else rows
        rows = [row | json.loads(arguments.common) for row in rows]
        run_all(rows, arguments.runs, arguments.jobs, arguments.limit, arguments.out)
    print("\n" + table([json.loads(line) for line in arguments.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
