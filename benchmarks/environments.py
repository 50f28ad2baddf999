"""Multi-turn episodes: how many per second, how busy the engine is while tools run, and what the prefix cache saves.

    python -m benchmarks.environments                                  small, on a CPU
    python -m benchmarks.environments --shape 1.5B --episodes 256 --turns 8 --sampled 256 --observed 512 \\
        --turn-seconds 0.1,1,5                                         as on an H200

Work: Qwen2.5 shapes, random weights, end of sequence ignored, every turn of full length; a tool takes half to one and
a half times the time given, in worker processes. `busy` is the share of time in which the engine computed, `gpu` what
nvidia-smi says about the device. `prefilled` are tokens of prompts that were computed; the last rows compute every turn
from its beginning.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sft_step import make_config

PROMPT = 128
ROW = "{tools:>8} {schedule:>8} {reuse:>6} {seconds:>8} {rate:>11} {tokens:>9} {busy:>6} {gpu:>6} {prefilled:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", "0.5B", "1.5B"], default="tiny")
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--sampled", type=int, default=32, help="tokens of a turn")
    parser.add_argument("--observed", type=int, default=64, help="tokens of a reply")
    parser.add_argument("--turn-seconds", default="0.1,0.5", help="how long tools take, with commas")
    parser.add_argument("--schedules", default="exact,free")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the results, one JSON object a line")
    args = parser.parse_args()
    rows = measure(args)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("\n".join(table(args, rows)))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    policy = make_policy(args.shape)
    seconds = [float(part) for part in args.turn_seconds.split(",")]
    chosen = [(one, schedule, True) for one in seconds for schedule in args.schedules.split(",")]
    chosen += [(seconds[0], schedule, False) for schedule in args.schedules.split(",")]
    rows: list[dict[str, Any]] = []
    engines: dict[bool, Any] = {}
    for turn_seconds, schedule, reuse in chosen:
        if reuse not in engines:
            for old in engines.values():
                old.close()
            engines = {reuse: make_engine(args, policy, reuse)}
            for warm in ("exact", "free"):  # captures the graphs that this load needs
                run(args, engines[reuse], 0.05, warm, turns=min(2, args.turns))
        rows.append({"shape": args.shape, **run(args, engines[reuse], turn_seconds, schedule), "reuse": reuse})
        print(json.dumps(rows[-1]), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return [{"device": device, "torch": torch.__version__, **row} for row in rows]


def make_policy(shape: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from lemma.models import installing
    from lemma.models.attention import NAME
    from lemma.models.policy import Policy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        causal = AutoModelForCausalLM.from_config(
            make_config(shape), dtype=torch.bfloat16 if device == "cuda" else torch.float32, attn_implementation=NAME
        )
    installing.install(causal, True)
    return Policy(causal.eval(), None)


def make_engine(args: argparse.Namespace, policy: Any, reuse: bool) -> Any:
    from lemma.engines.native.engine import NativeEngine

    longest = PROMPT + args.turns * (args.sampled + args.observed) + 64
    return NativeEngine(policy, cache_tokens=args.episodes * longest, share_prefixes=reuse)


class Words:
    """A tokenizer whose text is never used."""

    eos_token_id = -1

    def decode(self, ids: Any, **settings: Any) -> str:
        return f"{len(ids)} tokens"


class Noise:
    """Replies with a fixed number of tokens, which depend on the policy's turn."""

    def __init__(self, tokens: int, vocabulary: int):
        self._tokens, self._vocabulary = tokens, vocabulary

    def answer(self, said: np.ndarray, *reply: Any) -> tuple[np.ndarray, bool]:
        rng = np.random.default_rng(int(said.sum()))
        return rng.integers(5, self._vocabulary, self._tokens).astype(np.int32), False


def run(
    args: argparse.Namespace, engine: Any, turn_seconds: float, schedule: str, turns: int | None = None
) -> dict[str, Any]:
    """Play all episodes once; the cache is empty at the start."""
    from lemma.engines.protocol import Sampling
    from lemma.environments import CustomWorld
    from lemma.formats import FORMATS
    from lemma.rewards import REWARDS
    from lemma.rollouts import Scorer, World
    from lemma.rollouts.episode_runner import play

    turns = turns or args.turns
    place = f"{Path(__file__).with_name('slow_world.py')}:Slow"
    options = CustomWorld.model_validate({
        "class": place, "options": {"seconds": turn_seconds, "turns": turns}, "turns": turns,
        "reply_tokens": args.observed, "workers": args.workers, "schedule": schedule,
    })  # fmt: skip
    vocabulary = engine.policy.causal.config.vocab_size
    bridge: Any = Noise(args.observed, vocabulary)
    world = World(options, bridge, engine.policy.context)
    scorer = Scorer(FORMATS["question_only"](), [REWARDS["environment"]()], Words())
    sampling = Sampling(max_tokens=args.sampled, ignore_eos=True)
    engine.update_weights(0)
    _start_workers(world, asks_of(args, vocabulary)[:1])
    try:
        with watched(engine) as seen:
            begin = time.perf_counter()
            episodes = list(play(engine, asks_of(args, vocabulary), sampling, scorer, world=world))
            seconds = time.perf_counter() - begin
    finally:
        world.close()
    assert all(len(one.turns) == turns and one.reward == turns for one in episodes), "every episode is whole"
    sampled = sum(one.tokens for one in episodes)
    return {
        "turn_seconds": turn_seconds, "schedule": schedule, "episodes": len(episodes), "turns": turns,
        "seconds": seconds, "episodes_per_second": len(episodes) / seconds, "tokens_per_second": sampled / seconds,
        "busy": seen["busy"] / seconds, "gpu": seen["gpu"], "prefilled": seen["prefilled"],
    }  # fmt: skip


def asks_of(args: argparse.Namespace, vocabulary: int) -> list[Any]:
    from lemma.core.types import Message, Problem
    from lemma.rollouts.sample_request import SampleRequest

    rng = np.random.default_rng(1)
    return [
        SampleRequest(("bench", number), Problem((Message("user", str(number)),)), rng.integers(5, vocabulary, PROMPT))
        for number in range(args.episodes)
    ]


def _start_workers(world: Any, asks: list[Any]) -> None:
    """So that no episode waits for a process to start."""
    worlds = world.worlds
    held = [worlds.open(asks[0].problem, 0) for _ in range(world.options.workers)]
    left = set(map(id, held))
    while left:
        left -= {id(one) for one in worlds.answers(1.0)}
    for one in held:
        worlds.leave(one)


@contextmanager
def watched(engine: Any) -> Iterator[dict[str, Any]]:
    """Counts seconds in which the engine computes and tokens of prompts that it computes, and asks the device."""
    seen: dict[str, Any] = {"busy": 0.0, "prefilled": 0, "gpu": None}
    work, prefill = engine.work, engine.runner.prefill

    def timed() -> None:
        begin = time.perf_counter()
        work()
        seen["busy"] += time.perf_counter() - begin

    def counted(parts: list[Any]) -> Any:
        seen["prefilled"] += sum(count for _, count in parts)
        return prefill(parts)

    engine.work, engine.runner.prefill = timed, counted
    over = threading.Event()
    shares: list[float] = []
    asker = threading.Thread(target=_ask_device, args=(over, shares), daemon=True)
    asker.start()
    try:
        yield seen
    finally:
        del engine.work, engine.runner.prefill
        over.set()
        asker.join()
        seen["gpu"] = statistics.fmean(shares) if shares else None


def _ask_device(over: threading.Event, shares: list[float]) -> None:
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    while shutil.which(command[0]) and not over.wait(0.5):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        first = done.stdout.split("\n")[0].strip()
        if done.returncode or not first.isdigit():
            return
        shares.append(int(first) / 100)


def table(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[str]:
    shape = f"{args.shape}, {args.episodes} episodes of {args.turns} turns, {args.sampled} sampled and {args.observed}"
    names = {"tools": "tools s", "rate": "episodes/s", "tokens": "tokens/s"}
    same = {name: name for name in ("schedule", "reuse", "seconds", "busy", "gpu", "prefilled")}
    lines = [f"{shape} observed tokens a turn, {rows[0]['device']}", ROW.format(**names, **same)]
    for row in rows:
        lines.append(
            ROW.format(
                tools=f"{row['turn_seconds']:g}",
                schedule=row["schedule"],
                reuse="yes" if row["reuse"] else "no",
                seconds=f"{row['seconds']:.1f}",
                rate=f"{row['episodes_per_second']:.2f}",
                tokens=f"{row['tokens_per_second']:.0f}",
                busy=f"{row['busy']:.0%}",
                gpu="-" if row["gpu"] is None else f"{row['gpu']:.0%}",
                prefilled=row["prefilled"],
            )
        )
    return lines


if __name__ == "__main__":
    main()
