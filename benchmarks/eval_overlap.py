"""Does grading overlap with generation? Wall time of an evaluation compared with the engine's own time in the same run.

    python -m benchmarks.eval_overlap --rollouts FOLDER               on a GPU, with prefix sharing and without
    python -m benchmarks.eval_overlap --rollouts FOLDER --set paced   on a CPU, with an engine that only waits

Work: a Qwen2.5 shape with random weights, 1,024 problems x 4 samples x 512 tokens at temperature 1, end of sequence
ignored. What random weights say is gibberish, so a recorded completion of a real model takes its place before it is
read and graded; decoding the gibberish is paid for as well. FOLDER holds rows with `problem`, `answer` and `responses`
(math_x16.jsonl.gz, polaris_x16.jsonl.gz, qwen25math_x8.jsonl.gz, gsm8k_gpt3_x4.jsonl.gz).

`engine_seconds` is the time inside the engine, `seconds` the whole evaluation from prompts to results.json, of it
`before` the first request and `after` the last completion; `alone` is the same work without anything but the engine.
The aim is a ratio of at most 1.10.
"""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.rows import run_rows, spread, trouble
from benchmarks.sft_step import make_config

FILES = ("math_x16", "polaris_x16", "qwen25math_x8", "gsm8k_gpt3_x4")


def recorded(folder: Path, problems: int, samples: int) -> list[dict[str, Any]]:
    """Problems with as many recorded completions as are sampled; a row with more stands for several problems."""
    found: list[dict[str, Any]] = []
    for name in FILES:
        with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as handle:
            for row in map(json.loads, handle):
                texts = row["responses"]
                for part in range(len(texts) // samples):
                    found.append(
                        {
                            "id": f"{row['id']}/{part}",
                            "dataset": name,
                            "problem": row["problem"],
                            "answer": row["answer"],
                            "texts": texts[part * samples : (part + 1) * samples],
                        }
                    )
    assert len(found) >= problems, f"{folder} holds completions for {len(found)} problems only"
    return found[:problems]


def make_tokenizer(size: int) -> Any:
    """A tokenizer with the vocabulary's full size, so that decoding has a realistic cost."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, **{f"Ġ{'abcdefghij'[i % 10]}{i}": i for i in range(2, size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def make_policy(row: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from lemma.models import installing
    from lemma.models.attention import NAME
    from lemma.models.policy import Policy

    config = make_config(row.get("shape", "0.5B"))
    for name, value in row.get("override", {}).items():
        setattr(config, name, value)
    device = row.get("device", "cuda")
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        causal = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    installing.install(causal, True)
    return Policy(causal.eval(), make_tokenizer(config.vocab_size))


class Stopwatch:
    """An engine whose own time is measured, and that ignores the end of sequence."""

    OWN = ("_engine", "seconds", "first_asked", "last_given")

    def __init__(self, engine: Any):
        self._engine = engine
        self.seconds = 0.0
        self.first_asked = self.last_given = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Stopwatch.OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._engine, name, value)

    def submit(self, request: Any) -> None:
        began = time.perf_counter()
        self.first_asked = self.first_asked or began
        sampling = replace(request.sampling, ignore_eos=True, stop=(), stop_ids=())
        self._engine.submit(replace(request, sampling=sampling))
        self.seconds += time.perf_counter() - began

    def completions(self) -> Iterator[Any]:
        stream = self._engine.completions()
        while True:
            began = time.perf_counter()
            completion = next(stream, None)
            self.seconds += time.perf_counter() - began
            if completion is None:
                return
            self.last_given = time.perf_counter()
            yield completion


def speaking(rows: list[dict[str, Any]]) -> AbstractContextManager[Any]:
    """Inside `with`, completions are decoded, and then their text is replaced by a real model's answer to the
    problem."""
    from lemma.evaluation.eval_samples import BenchmarkScorer

    read = BenchmarkScorer.read

    def said(scorer: BenchmarkScorer, episodes: Any) -> None:
        read(scorer, episodes)
        for episode in episodes:
            episode.turns[-1].text = str(rows[int(episode.key[3])]["texts"][episode.sample])

    return mock.patch.object(BenchmarkScorer, "read", said)


class Paced:
    """An engine without a model: `slots` sequences at a time, and so many seconds for each wave of them. Its waiting
    leaves the interpreter to others, as an engine on a GPU does; between two bursts it keeps it for a while."""

    name, context, in_place_of = "paced", 1 << 20, None

    def __init__(self, vocabulary: int, slots: int, wave_seconds: float, bursts: int = 32, host_share: float = 0.02):
        self.slots, self.wave_seconds, self.bursts, self.host_share = slots, wave_seconds, bursts, host_share
        self.device_wait, self.sampled_tokens = threading.Event(), 0
        self.finished: deque[Any] = deque()
        self._rng, self._vocabulary = np.random.default_rng(0), vocabulary
        self._waiting: list[Any] = []
        self._wave: list[Any] = []
        self._left = 0

    def submit(self, request: Any) -> None:
        self._waiting += [(request, sample) for sample in range(request.n)]

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._wave)

    def work(self) -> None:
        """One burst of the wave."""
        from lemma.engines.protocol import Completion

        if not self._wave:
            self._wave, self._waiting = self._waiting[: self.slots], self._waiting[self.slots :]
            self._left = self.bursts
        new = self._wave[0][0].sampling.max_tokens
        seconds = self.wave_seconds / self.bursts
        self.device_wait.set()
        time.sleep(seconds * (1 - self.host_share))
        self.device_wait.clear()
        ends = time.perf_counter() + seconds * self.host_share
        self.sampled_tokens += len(self._wave) * new // self.bursts
        while time.perf_counter() < ends:
            pass
        self._left -= 1
        if not self._left:
            zeros = np.zeros(new, dtype=np.float32)
            for request, sample in self._wave:
                own = self._rng.integers(2, self._vocabulary, new).astype(np.int32)
                self.finished.append(Completion(request.key, sample, own, zeros, zeros, "length", 0))
            self._wave = []

    def completions(self) -> Iterator[Any]:
        while self.is_busy or self.finished:
            while self.finished:
                yield self.finished.popleft()
            if self.is_busy:
                self.work()


def run_lemma(row: dict[str, Any]) -> dict[str, Any]:
    from lemma.engines.native.engine import NativeEngine
    from lemma.engines.protocol import Request, Sampling, generate
    from lemma.formats.encode import encode_prompt
    from lemma.formats.published import No

    policy = make_policy(row)
    engine = NativeEngine(policy, **row.get("engine", {}))
    result = evaluated(row, engine, policy)
    sampling = Sampling(max_tokens=row["new"], ignore_eos=True)
    rows = recorded(Path(row["rollouts"]), row["problems"], row["samples"])
    prompts = [encode_prompt(No(), _problem(one), policy.tokenizer) for one in rows]
    times = []
    for repeat in range(row["repeats"]):
        began = time.perf_counter()
        asks = [Request(("alone", repeat, i), prompt, sampling, row["samples"]) for i, prompt in enumerate(prompts)]
        generate(engine, asks)
        times.append(time.perf_counter() - began)
    alone = statistics.median(times)
    return result | {"alone_seconds": alone, "ratio_to_alone": result["seconds"] / alone}


def run_paced(row: dict[str, Any]) -> dict[str, Any]:
    """What the evaluation adds to an engine that takes `wave_seconds` for `slots` sequences at a time."""
    size = row.get("vocabulary", 151936)
    policy = make_policy(row | {"shape": "tiny", "override": {"vocab_size": size}, "device": "cpu"})
    engine = Paced(size, row.get("slots", 1024), row.get("wave_seconds", 2.5), host_share=row.get("host_share", 0.02))
    return evaluated(row, engine, policy)


def evaluated(row: dict[str, Any], engine: Any, policy: Any) -> dict[str, Any]:
    """The median of several evaluations, after a warm-up that captures graphs and starts the graders."""
    from lemma.evaluation.evaluator import EvalSettings, evaluate

    rows = recorded(Path(row["rollouts"]), row["problems"], row["samples"])
    settings = EvalSettings(samples=row["samples"], temperature=1.0, max_tokens=row["new"], format="no")
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "recorded.jsonl"
        source.write_text("".join(json.dumps({**one, "texts": None}) + "\n" for one in rows), encoding="utf-8")
        for repeat in range(row["repeats"] + 1):
            watch = Stopwatch(engine)
            began = time.perf_counter()
            with speaking(rows):
                report = evaluate(watch, policy, [str(source)], settings, Path(folder) / str(repeat))  # type: ignore[arg-type]
            ended = time.perf_counter()
            times = {"seconds": ended - began, "engine_seconds": watch.seconds}
            times |= {"before_seconds": watch.first_asked - began, "after_seconds": ended - watch.last_given}
            runs.append(times | {"ratio": times["seconds"] / times["engine_seconds"]})
    own = report.rows["recorded"]
    tokens = sum(one.tokens for one in own)
    middle = sorted(runs[1:], key=lambda run: run["ratio"])[len(runs[1:]) // 2]
    return (
        row
        | middle
        | {
            "spread": spread([run["ratio"] for run in runs[1:]]),
            "all_ratios": [run["ratio"] for run in runs],
            "tokens_per_second": tokens / middle["seconds"],
            "tokens": tokens,
            "verdicts": dict(Counter(one.verdict for one in own)),
        }
    )


def _problem(one: dict[str, Any]) -> Any:
    from lemma.core.types import Message, Problem

    return Problem((Message("user", one["problem"]),), (one["answer"],))


OPTIONS = {"problems": 1024, "samples": 4, "new": 512, "repeats": 3, "rollouts": ".gpu/data/rollouts"}
SETS: dict[str, list[dict[str, Any]]] = {
    "main": [
        {"who": "lemma", "shape": "0.5B"},
        {"who": "lemma", "shape": "0.5B", "engine": {"share_prefixes": False}},
    ],
    "paced": [{"who": "paced"}],
}


def table(results: list[dict[str, Any]]) -> str:
    shown = ("seconds", "engine_seconds", "ratio", "before_seconds", "after_seconds", "alone_seconds", "ratio_to_alone")
    lines = [f"| | {' | '.join(shown)} | spread |", "|---" * (len(shown) + 2) + "|"]
    for one in results:
        name = ", ".join([one["who"], *(f"{key} {one[key]}" for key in ("shape", "engine") if key in one)])
        cells = [f"{one[key]:.3f}" if key in one else "" for key in (*shown, "spread")]
        lines.append(f"| {name} | {trouble(one) if 'error' in one else ' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    runners: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"lemma": run_lemma, "paced": run_paced}
    run_rows("benchmarks.eval_overlap", __doc__, runners, SETS, options=OPTIONS, table=table)
