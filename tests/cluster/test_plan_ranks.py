"""`lemma plan --ranks`: memory of a rank by hand and by the table of the design, times by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lemma.cli import main
from lemma.models.fitting import USUAL
from lemma.models.gpus import GPUS, find_gpu
from lemma.models.memory import GIB, SHARDS, plan_training
from lemma.models.model_options import LoraOptions, ModelOptions
from lemma.models.step_time import StepWork

# GiB of weights and optimiser on one of 8 ranks: none, optimiser, gradients, weights.
TABLE = {
    1.5: (25.9, 10.8, 5.8, 2.9),
    7.0: (127.7, 53.2, 28.4, 14.2),
    14.0: (248, 103, 55, 27.5),
    32.0: (549, 229, 122, 61),
}


def state(size: float, shard: str, ranks: int = 8, precision: str = "bf16", **options: object) -> float:
    plan = plan_training(USUAL[size], ModelOptions(**options), precision, 1024, ranks=ranks, shard=shard)  # type: ignore[arg-type]
    return (plan.weights + plan.optimiser) / GIB


@pytest.mark.parametrize("size", TABLE)
def test_the_state_of_a_rank(size: float) -> None:
    for shard, expected in zip(SHARDS, TABLE[size], strict=True):
        assert state(size, shard) == pytest.approx(expected, rel=0.012), shard
    assert state(32.0, "gradients", ranks=16) == pytest.approx(91, rel=0.012)


def test_bytes_a_parameter() -> None:
    billions = USUAL[7.0].parameters / GIB
    for ranks in (2, 8, 64):
        found = [state(7.0, shard, ranks) / billions for shard in SHARDS]
        assert found == pytest.approx([18, 6 + 12 / ranks, 2 + 16 / ranks, 16 / ranks])
        in_fp32 = [state(7.0, shard, ranks, "fp32") / billions for shard in SHARDS]
        assert in_fp32 == pytest.approx([16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks])
    assert {state(7.0, shard, 1) for shard in SHARDS} == {state(7.0, "none", 8)}, "one rank splits nothing"


def test_adapters_split_what_is_trained_and_weights_split_the_rest() -> None:
    lora = LoraOptions(r=16)
    whole = state(7.0, "none", lora=lora)
    assert state(7.0, "gradients", lora=lora) > 0.95 * whole
    assert state(7.0, "weights", lora=lora) == pytest.approx(whole / 8, rel=0.1)


def test_what_is_whole_while_it_computes() -> None:
    """Embedding, head and two blocks in bf16; or a pack's gradients and those at home."""
    shape = USUAL[7.0]
    plan = plan_training(shape, ModelOptions(), "bf16", 1024, ranks=8, shard="weights")
    outside = 2 * 152064 * 3584
    block = (shape.parameters - outside) / 28
    assert plan.gathered == pytest.approx(2 * outside + 4 * block) and plan.total > plan.gathered
    own = plan_training(shape, ModelOptions(), "bf16", 1024, ranks=8, shard="gradients")
    assert own.activations + own.head + own.gathered == pytest.approx(3 * shape.parameters), "2 bytes in bf16, and 8/N"
    assert plan_training(shape, ModelOptions(), "bf16", 1024, ranks=8, shard="optimiser").gathered == shape.parameters


H100 = GPUS["h100-80"]
WORK = StepWork(parameters=7e9, trainable=7e9, tokens=2**20, pack=16384)


def test_an_update() -> None:
    assert WORK.update_seconds(H100, 8) == pytest.approx(6 * 7e9 * 2**20 / 8 / (0.4 * 989e12))
    adapters = StepWork(7e9, 1e7, 2**20, 16384, checkpointing=True)
    assert adapters.update_seconds(H100, 8) == pytest.approx(WORK.update_seconds(H100, 8)), "4PT and a forward more"


def test_what_travels() -> None:
    """Eight packs a rank; of every buffer a rank sends seven eighths."""
    bytes_of = {shard: WORK.communication_bytes(shard, 8) / (7e9 * 7 / 8) for shard in SHARDS}
    assert bytes_of == pytest.approx({"none": 8, "optimiser": 6, "gradients": 8 * 4 + 2, "weights": 8 * 8})
    assert all(WORK.communication_bytes(shard, 1) == 0 for shard in SHARDS)
    within = WORK.communication_seconds(H100, 8, "none")
    assert within == pytest.approx(8 * 7e9 * 7 / 8 / (0.7 * 450e9))
    assert WORK.communication_seconds(H100, 16, "none") > 8 * within, "machines are farther apart than their GPUs"


def test_decoding() -> None:
    """128 samples a rank: one round where the cache has room for all, two where for half."""
    work = StepWork(7e9, 7e9, 1.0, 1, samples=1024, prompt=200, response=800)
    prefill = 2 * 7e9 * 128 * 200 / (0.4 * 989e12)
    a_token = (2 * 7e9 + 128 * 600 * 57344) / (0.6 * 3350e9)
    assert work.generation_seconds(H100, 8, 128_000, 57344) == pytest.approx(prefill + 800 * a_token)
    half = (2 * 7e9 + 64 * 600 * 57344) / (0.6 * 3350e9)
    assert work.generation_seconds(H100, 8, 64_000, 57344) == pytest.approx(prefill + 2 * 800 * half)
    assert work.generation_seconds(H100, 8, 999, 57344) is None
    many = StepWork(7e9, 7e9, 1.0, 1, samples=8192, prompt=0, response=10)
    assert many.generation_seconds(H100, 8, 1e9, 0.0) == pytest.approx(10 * 2 * 7e9 * 1024 / (0.4 * 989e12))


def test_gpus_by_name() -> None:
    assert find_gpu("H200") is GPUS["h200-141"] and find_gpu("a100_40") is GPUS["a100-40"]
    for wrong in ("a100", "h1000", ""):
        with pytest.raises(Exception, match="no GPU is called"):
            find_gpu(wrong)


RECIPE = """
model: {path: someone/Qwen2.5-7B}
stages:
  sft: {steps: 1, data: {source: rows.jsonl}}
  grpo: {steps: 1, data: {source: rows.jsonl}, rollout: {max_tokens: 1024}, algorithm: {name: dapo, group_size: 8}}
"""


def test_the_tables_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--ranks", "8", "--gpu", "h100-80", "--length", "512"]) == 1
    out = capsys.readouterr().out
    sft, grpo = out[out.index("8 x h100-80") :].split("\nstage ")[1:]
    assert "a step of 16,384 tokens (computed)" in sft and "a step of 131,072 tokens (computed)" in grpo
    fits = dict(re.findall(r"^  (\w+) .*? (yes|no)\b", grpo, re.MULTILINE))
    assert fits == {"none": "no", "optimiser": "yes", "gradients": "yes", "weights": "yes"}
    assert "yes*" in grpo and "* where activations are recomputed" in grpo
    assert "The first that fits: `shard: optimiser`" in grpo and "servers" in grpo and "servers" not in sft
    assert re.search(r"none +127\.7 ", sft) and re.search(r"weights +14\.2 ", sft)
    assert "Times are computed, not measured" in out and "guessed from its name" in out
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--ranks", "8", "--gpu", "a100-40", "--length", "64"]) == 1
    out = capsys.readouterr().out
    assert "Only `shard: weights` fits." in out and "fits; samples then come from generation servers." in out
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--ranks", "2", "--gpu", "l4"]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits" in out
    assert out.endswith(
        "something that it needs is missing or wrong, and a stage does not fit into memory (see above).\n"
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--ranks", "0"]) == 2
