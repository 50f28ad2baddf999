"""Is grading hidden behind generation? Wall time of an evaluation beside the engine's own time in the same run.

    python -m benchmarks.eval_overlap --rows '[{"who": "lemma", "rollouts": "FOLDER"}]'

Work: a Qwen2.5 shape with random weights, 1,024 problems x 4 samples x 512 tokens at temperature 1, end of sequence
ignored. What random weights say is gibberish, so a recorded completion of a real model takes its place before it is
read and graded; decoding the gibberish is paid for as well. FOLDER holds rows with `problem`, `answer` and `responses`
(math_x16.jsonl.gz, polaris_x16.jsonl.gz, qwen25math_x8.jsonl.gz, gsm8k_gpt3_x4.jsonl.gz).

`engine_seconds` is the time inside the engine, `seconds` the whole evaluation from prompts to results.json, of it
`before` the first request and `after` the last completion; `alone` is the same work without anything but the engine.
The aim is a ratio of at most 1.15.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import run_rows
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
    """A tokenizer of the size of the vocabulary, so that decoding costs what it costs."""
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

    from lemma.models import blocks
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
    blocks.install(causal, True)
    return Policy(causal.eval(), make_tokenizer(config.vocab_size))


class Stopwatch:
    """An engine whose own time is measured, that ignores the end of sequence and remembers what it gave to whom."""

    def __init__(self, engine: Any):
        self._engine = engine
        self.name, self.policy = engine.name, engine.policy
        self.seconds = 0.0
        self.first_asked = self.last_given = 0.0
        self.keys: dict[bytes, tuple[Any, int]] = {}

    @property
    def meanwhile(self) -> Any:
        return self._engine.meanwhile

    @meanwhile.setter
    def meanwhile(self, value: Any) -> None:
        self._engine.meanwhile = value

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
            self.keys[_name(completion.ids)] = (completion.key, completion.sample)
            yield completion


def _name(ids: Any) -> bytes:
    """What tells a completion of random weights from all others."""
    return np.asarray(ids[:16], dtype=np.int64).tobytes()


class Ventriloquist:
    """A tokenizer that decodes what it is given and says what a real model once said to that problem."""

    def __init__(self, tokenizer: Any, engine: Stopwatch, rows: list[dict[str, Any]]):
        self._tokenizer, self._engine, self._rows = tokenizer, engine, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: Any, **options: Any) -> str:
        self._tokenizer.decode(ids, **options)
        key, sample = self._engine.keys[_name(ids)]
        return str(self._rows[int(key[3])]["texts"][sample])


def run_lemma(row: dict[str, Any]) -> dict[str, Any]:
    from lemma.engines.native.engine import NativeEngine
    from lemma.engines.protocol import Request, Sampling, generate
    from lemma.evaluation.evaluator import EvalSettings, evaluate
    from lemma.formats.encode import encode_prompt
    from lemma.formats.published import No

    problems, samples, new = row.get("problems", 1024), row.get("samples", 4), row.get("new", 512)
    rows = recorded(Path(row["rollouts"]), problems, samples)
    policy = make_policy(row)
    tokenizer = policy.tokenizer
    engine = NativeEngine(policy, share_prefixes=False, **row.get("engine", {}))
    settings = EvalSettings(samples=samples, temperature=1.0, max_tokens=new, format="no")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "recorded.jsonl"
        source.write_text("".join(json.dumps({**one, "texts": None}) + "\n" for one in rows), encoding="utf-8")
        runs = []
        for repeat in range(row.get("repeats", 2) + 1):  # the first captures the graphs
            watch = Stopwatch(engine)
            policy.tokenizer = Ventriloquist(tokenizer, watch, rows)
            began = time.perf_counter()
            out = Path(folder) / str(repeat)
            report = evaluate(watch, policy, [str(source)], settings, out)  # type: ignore[arg-type]
            ended = time.perf_counter()
            times = {"seconds": ended - began, "engine_seconds": watch.seconds}
            times |= {"before_seconds": watch.first_asked - began, "after_seconds": ended - watch.last_given}
            runs.append((times, report))
        policy.tokenizer = tokenizer
        asks = [_problem(one) for one in rows]
        sampling = Sampling(max_tokens=new, ignore_eos=True)
        prompts = [encode_prompt(No(), problem, tokenizer) for problem in asks]
        began = time.perf_counter()
        generate(engine, [Request(("alone", i), prompt, sampling, samples) for i, prompt in enumerate(prompts)])
        alone = time.perf_counter() - began
    best, report = min(runs[1:], key=lambda run: _ratio(run[0]))
    own = report.rows["recorded"]
    tokens = sum(one.tokens for one in own)
    return (
        row
        | best
        | {
            "ratio": _ratio(best),
            "alone_seconds": alone,
            "ratio_to_alone": best["seconds"] / alone,
            "all_ratios": [_ratio(times) for times, _ in runs],
            "tokens_per_second": tokens / best["seconds"],
            "tokens": tokens,
            "verdicts": dict(Counter(one.verdict for one in own)),
        }
    )


def _ratio(times: dict[str, float]) -> float:
    return times["seconds"] / times["engine_seconds"]


def _problem(one: dict[str, Any]) -> Any:
    from lemma.core.types import Message, Problem

    return Problem((Message("user", one["problem"]),), (one["answer"],))


def default_rows() -> list[dict[str, Any]]:
    return [{"who": "lemma", "shape": "0.5B", "rollouts": ".gpu/data/rollouts"}]


if __name__ == "__main__":
    run_rows("benchmarks.eval_overlap", __doc__, {"lemma": run_lemma}, default_rows)
