"""The load of benchmarks/environments.py on TRL's `environment_factory`: how long the same episodes take there.

    python -m benchmarks.environments_trl --shape tiny --episodes 8 --turns 3 --sampled 16 --observed 32
    python -m benchmarks.environments_trl --shape 1.5B --episodes 32 --turns 8 --sampled 256 --observed 512

Both play the same number of episodes with turns and replies of the same lengths, in one process after another; random
weights cannot call a tool, so TRL's parser is told that every turn does. Only playing is timed: TRL's `_generate`, with
the generation of transformers, and Lemma's `play`, exact schedule. A tool takes half to one and a half times the time
given; Lemma's also answers the last turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.environments import PROMPT, make_engine, make_policy, run
from benchmarks.sft_step import make_config

TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %} <e>"
    "{% endfor %}{% if add_generation_prompt %}<s> assistant{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", "0.5B", "1.5B"], default="tiny")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sampled", type=int, default=16, help="tokens of a turn")
    parser.add_argument("--observed", type=int, default=32, help="tokens of a reply")
    parser.add_argument("--turn-seconds", default="0.1,1", help="how long tools take, with commas")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--who", choices=["lemma", "trl"], help="only this one, in this process")
    args = parser.parse_args()
    if args.who:
        play_here = {"lemma": play_with_lemma, "trl": play_with_trl}[args.who]
        print(json.dumps(play_here(args)))
        return
    command = [sys.executable, "-m", "benchmarks.environments_trl", *sys.argv[1:], "--who"]
    results = {}
    for who in ("lemma", "trl"):
        done = subprocess.run([*command, who], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{who}: {done.stderr[-2000:]}")
        results[who] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{args.shape}, {args.episodes} episodes of {args.turns} turns, {args.sampled} + {args.observed} tokens a turn"
    )
    print("| tools, s | Lemma, s | TRL, s | ratio |\n|---|---|---|---|")
    for seconds in args.turn_seconds.split(","):
        ours, theirs = (sorted(results[who][seconds]) for who in ("lemma", "trl"))
        middle = len(ours) // 2
        shown = [f"{times[middle]:.2f} ({times[0]:.2f} to {times[-1]:.2f})" for times in (ours, theirs)]
        print(f"| {seconds} | {shown[0]} | {shown[1]} | {theirs[middle] / ours[middle]:.1f} |")


def play_with_lemma(args: argparse.Namespace) -> dict[str, list[float]]:
    engine = make_engine(args, make_policy(args.shape), True)
    run(args, engine, 0.0, "exact")
    return {
        seconds: [run(args, engine, float(seconds), "exact")["seconds"] for _ in range(args.repeat)]
        for seconds in args.turn_seconds.split(",")
    }


def play_with_trl(args: argparse.Namespace) -> dict[str, list[float]]:
    """The seconds of `_generate`, which plays all turns; counts show that it played what was asked for."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    trainer, times = make_trainer(args)
    inputs = [{"prompt": [{"role": "user", "content": words(number, PROMPT - 4)}]} for number in range(args.episodes)]
    results = {}
    trainer.model.train()
    for seconds in ["0", *args.turn_seconds.split(",")]:
        SlowTool.seconds = float(seconds)
        times.clear()
        for _ in range(1 if seconds == "0" else args.repeat):
            batch = trainer._generate_and_score_completions(inputs)
            sampled = int(batch["tool_mask"].sum())
            assert sampled == args.episodes * args.turns * args.sampled, f"{sampled} tokens were sampled"
        results[seconds] = list(times)
    return results


def words(number: int, count: int) -> str:
    return " ".join(f"w{(number * 7919 + place * 31) % 1000}" for place in range(count))


class SlowTool:
    """A TRL environment whose only tool takes time and says nothing."""

    seconds = 0.0
    observed = 0

    def reset(self, **row: Any) -> None:
        self.calls = 0

    def look(self) -> str:
        """Looks."""
        self.calls += 1
        time.sleep(SlowTool.seconds * (0.5 + (self.calls * 0.37) % 1.0))
        return words(self.calls, SlowTool.observed - 6)


def make_trainer(args: argparse.Namespace) -> tuple[Any, list[float]]:
    import torch
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    SlowTool.observed = args.observed
    tokenizer = make_tokenizer()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = make_config(args.shape)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device == "cuda" else torch.float32, attn_implementation="sdpa"
        )
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    turns = {"role": "assistant", "content": "", "tool_calls": [call]}
    grpo_trainer.parse_response = lambda *given, **more: dict(turns)
    longest = args.turns * (args.sampled + args.observed) + 64
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=args.episodes, num_generations=args.episodes,
        max_completion_length=longest, max_tool_calling_iterations=args.turns - 1, report_to=[], bf16=device == "cuda",
        use_cpu=device == "cpu", gradient_checkpointing=False, log_completions=False, max_steps=1, beta=0.0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=options, reward_funcs=lambda completions, **more: [0.0] * len(completions),
        train_dataset=make_dataset(args), processing_class=tokenizer, environment_factory=SlowTool,
    )  # fmt: skip
    trainer.generation_config.max_new_tokens = trainer.generation_config.min_new_tokens = args.sampled
    times: list[float] = []
    generate = trainer._generate

    def timed(prompts: Any) -> Any:
        begin = time.perf_counter()
        result = generate(prompts)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        return result

    trainer._generate = timed
    return trainer, times


def make_dataset(args: argparse.Namespace) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": [{"role": "user", "content": words(0, PROMPT)}]}] * args.episodes)


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<e>", "<pad>", "<s>", "user", "assistant", "tool", "look", *(f"w{n}" for n in range(1000))]
    plain = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<e>", pad_token="<pad>", chat_template=TEMPLATE
    )
    tokenizer.response_template = {"every turn": "is a call"}
    return tokenizer


if __name__ == "__main__":
    main()
