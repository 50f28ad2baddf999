"""`shard: weights` (FSDP2) on gloo ranks: the numbers of one process, and checkpoints and models for everybody."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from lemma.cli import main
from lemma.config.load import load_values
from lemma.core.errors import UserError
from lemma.core.ranks import rank
from lemma.engines.vllm.weights import write_adapter, write_weights
from lemma.learning import loss_scaler
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.learning.weight_split import split_weights, whole_tensor
from lemma.models.critic import Critic
from lemma.models.memory import Shape, plan_training
from lemma.models.model_options import ModelOptions
from lemma.models.policy import Policy
from lemma.objectives import NegativeLogLikelihood, Objective
from lemma.objectives.value import ClippedValueLoss
from lemma.recipe import Recipe
from lemma.runs.run_checks import check_split
from tests.cluster.crew import Crew
from tests.cluster.forked import Forked, lemma_rank
from tests.cluster.test_run_ranks import PREFERENCE, SFT, TINY, pairs, recipe_of, trained  # noqa: F401
from tests.learning.test_invariance import MAKE, items_of
from tests.models.small import CPU, SHAPE, in_float64, relative, tiny_policy, trajectories

LENGTHS = (7, 31, 5, 12, 2, 40, 19, 19)
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# An objective of each scope: a token's, a pair's, all sequences of a step together.
SCOPES = ("nll", "dpo", "policy_top_entropy")


def policy_in(kind: str) -> Policy:
    return in_float64(tiny_policy()) if kind == "float64" else tiny_policy(precision=PRECISIONS[kind])


def learner_of(policy: Policy | Critic, shard: str, budget: int = 50) -> Learner:
    optim = OptimOptions(lr=1e-3, clip=0.5, weight_decay=0.1)
    return Learner(policy, optim, token_budget=budget, total_steps=4, temperature=0.7, shard=shard)  # type: ignore[arg-type]


def steps_of(kind: str, name: str, shard: str, steps: int = 1, budget: int = 50, recomputed: int = 0) -> dict[str, Any]:
    policy = policy_in(kind)
    policy.recompute(recomputed)
    # From this scale on no gradient of this model overflows in fp16.
    with mock.patch.object(loss_scaler, "SCALE_START", 256.0):
        learner = learner_of(policy, shard, budget)
    objective: Objective = MAKE[name]() if name != "nll" else NegativeLogLikelihood()
    items = items_of(policy) if kind == "float64" else trajectories(LENGTHS)
    grads: dict[str, torch.Tensor] = {}
    update = learner.optimiser.step

    def look(rate: float) -> tuple[float, bool]:
        for key, parameter in learner.optimiser.parameters.items():
            grad = parameter.grad if parameter.grad is not None else learner.optimiser.masters[key].grad
            assert grad is not None
            grads[key] = whole_tensor(grad).clone()
        return update(rate)

    with mock.patch.object(learner.optimiser, "step", look):
        reports = [learner.step(items, objective) for _ in range(steps)]
    return {
        "losses": torch.tensor([r.loss for r in reports], dtype=torch.float64),
        "norms": torch.tensor([r.grad_norm for r in reports], dtype=torch.float64),
        **{f"gradient of {key}": grad for key, grad in grads.items()},
        **{f"new {key}": whole_tensor(p.detach()).clone() for key, p in policy.parameters().items()},
        "scores": torch.cat([torch.from_numpy(part) for part in learner.score(items)]),
        "held out": torch.tensor([learner.evaluate(items, objective)["loss"]]),
    }


def check_close(found: dict[str, Any], expected: dict[str, Any], limit: float) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        assert relative(found[key], expected[key]) < limit, key


@pytest.mark.parametrize("name", SCOPES)
def test_loss_and_gradients_are_those_of_one_process(crew: Crew, name: str) -> None:
    expected = steps_of("float64", name, "none")
    for count, budget in ((2, 50), (3, 10**6)):  # four packs for two ranks; one pack for three, of which two are idle
        for found in crew.run(count, steps_of, "float64", name, "weights", 1, budget):
            check_close(found, expected, 1e-12)


@pytest.mark.parametrize(("kind", "limit"), [("float32", 1e-6), ("bfloat16", 3e-3), ("float16", 3e-3)])
def test_in_the_precisions_of_a_run(crew: Crew, kind: str, limit: float) -> None:
    """Masters are fp32; in bf16 the weights of one process are theirs, rounded. Blocks may be computed twice."""
    found = crew.run(2, steps_of, kind, "nll", "weights", 2, 50, 1)[1]
    check_close(found, steps_of(kind, "nll", "none", 2), limit)
    assert all(found[key].dtype == torch.float32 for key in found if key.startswith("new "))


def values_of(shard: str) -> dict[str, torch.Tensor]:
    """A critic: its head keeps its precision over a body in bf16."""
    body = tiny_policy(precision="bf16")
    critic = Critic(body.backbone, 32, CPU, seed=0)
    learner = learner_of(critic, shard)
    items = trajectories(LENGTHS)
    for item in items:
        item.token_fields |= {"return": item.token_fields["advantage"], "value": 0 * item.token_fields["advantage"]}
    report = learner.step(items, ClippedValueLoss())
    scores = torch.cat([torch.from_numpy(part) for part in learner.score(items, output="values")])
    return {"loss": torch.tensor([report.loss]), "norm": torch.tensor([report.grad_norm]), "scores": scores}


def test_a_critic(crew: Crew) -> None:
    check_close(crew.run(2, values_of, "weights")[0], values_of("none"), 3e-3)


def saved(shard: str, before: tuple[dict[str, torch.Tensor], dict[str, Any]] | None) -> tuple[Any, ...]:
    """One step after `before`: what this rank saves, and all weights."""
    policy = policy_in("float32")
    learner = learner_of(policy, shard)
    if before is not None:
        with torch.no_grad():
            for value in learner.optimiser.values.values():
                value.fill_(0.25)
        learner.load(*before)
    learner.step(trajectories(LENGTHS), NegativeLogLikelihood())
    tensors, extra = learner.state()
    weights = {key: whole_tensor(p.detach()).clone() for key, p in policy.parameters().items()}
    return {key: tensor.clone() for key, tensor in tensors.items()}, extra, weights


def test_a_state_goes_on_with_everything_whole_and_back(crew: Crew) -> None:
    """Three ranks that split weights, two that split the optimiser, two that split weights, one process."""
    expected = steps_of("float32", "nll", "none", steps=4)
    before = None
    for count, shard in ((3, "weights"), (2, "optimiser"), (2, "weights"), (1, "none")):
        parts = crew.run(count, saved, shard, before)
        before = {key: tensor for own, _, _ in parts for key, tensor in own.items()}, parts[0][1]
        assert len(before[0]) == sum(len(own) for own, _, _ in parts), "every number is saved once"
    weights = parts[0][2]
    check_close(weights, {key: expected[f"new {key}"] for key in weights}, 1e-6)


def measured() -> tuple[float, float]:
    """Bytes of weights, and of gradients and moments, that this rank holds after a step."""
    learner = learner_of(policy_in("bfloat16"), "weights")
    learner.step(trajectories(LENGTHS), NegativeLogLikelihood())
    inner = learner.optimiser.inner
    assert inner is not None and not hasattr(learner.policy.backbone.layers[0].mlp, "lemma_joint")  # type: ignore[union-attr]
    weights = sum(value.nbytes for value in learner.optimiser.values.values())
    moments = [kept for state in inner.state.values() for kept in state.values() if kept.ndim]
    return float(weights), float(weights + sum(kept.nbytes for kept in moments))  # a gradient is as large as its weight


def test_the_state_is_what_the_plan_says(crew: Crew) -> None:
    plan = plan_training(Shape.of_tiny(SHAPE), ModelOptions(tiny=SHAPE), "bf16", 64, ranks=2, shard="weights")
    for weights, others in crew.run(2, measured):
        assert weights == pytest.approx(plan.weights, rel=0.03) and others == pytest.approx(plan.optimiser, rel=0.03)


# --- whole runs ----------------------------------------------------------------------------------------------------


def final(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "stages/stage/final/model.safetensors")


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]


def check_runs(one: Path, other: Path, limit: float = 1e-5) -> None:
    assert losses(one) == pytest.approx(losses(other), rel=limit)
    check_close(final(one), final(other), limit)


def test_a_supervised_run_goes_on_under_another_split(crew: Crew, tmp_path: Path) -> None:
    crew.run(1, trained, recipe_of(tmp_path, "whole", SFT | {"steps": 6}, {"slots": 2}))
    for steps, count, shard in ((2, 2, "weights"), (4, 2, "optimiser"), (6, 3, "weights")):
        crew.run(count, trained, recipe_of(tmp_path, "part", SFT | {"steps": steps}, {"slots": 2, "shard": shard}))
    saved = tmp_path / "part/stages/stage/checkpoints/step-00000006"
    assert len(list(saved.glob("tensors-*"))) == 3
    check_runs(tmp_path / "part", tmp_path / "whole")


def test_adapters(crew: Crew, tmp_path: Path) -> None:
    """The frozen weights under them are split as well, and merged from the rows of all ranks."""
    for count, shard in ((1, "none"), (2, "weights")):
        content = recipe_of(tmp_path, shard, SFT | {"steps": 2}, {"slots": 2, "shard": shard})
        crew.run(count, trained, content | {"model": content["model"] | {"lora": {"r": 4}}})
    assert losses(tmp_path / "weights") == pytest.approx(losses(tmp_path / "none"), rel=1e-5)
    for file in ("merged/model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = (load_file(tmp_path / run / "stages/stage/final" / file) for run in ("weights", "none"))
        check_close(one, other, 1e-5)


def published(folder: Path, *, is_split: bool) -> None:
    """What vLLM reads of a policy with an adapter."""
    policy = tiny_policy(lora=True)
    if is_split:
        split_weights(policy)
    write_weights(policy, folder / str(rank()))
    write_adapter(policy, folder / str(rank()))


def test_what_servers_read_is_that_of_one_process(crew: Crew, tmp_path: Path) -> None:
    for name in ("0", "1", "alone/0"):
        (tmp_path / name).mkdir(parents=True)
    published(tmp_path / "alone", is_split=False)
    crew.run(2, partial(published, is_split=True), tmp_path)
    for file in ("model.safetensors", "adapter_model.safetensors"):
        expected = (tmp_path / "alone/0" / file).read_bytes()
        assert all((tmp_path / name / file).read_bytes() == expected for name in ("0", "1"))


def test_a_preference_run(crew: Crew, tmp_path: Path, pairs: Path) -> None:  # noqa: F811
    """With a reference, in bf16: the model on disk is in bf16, and its configuration says so."""
    data = {"source": str(pairs), "cache": str(tmp_path / "cache")}
    for count, shard in ((1, "none"), (2, "weights")):
        content = recipe_of(
            tmp_path, shard, PREFERENCE | {"algorithm": "dpo", "data": data}, {"slots": 2, "shard": shard}
        )
        crew.run(count, trained, content | {"model": content["model"] | {"precision": "bf16"}})
    check_runs(tmp_path / "weights", tmp_path / "none", 1e-2)
    assert {tensor.dtype for tensor in final(tmp_path / "weights").values()} == {torch.bfloat16}
    for name in ("config.json", "generation_config.json"):
        one, other = (json.loads((tmp_path / r / "stages/stage/final" / name).read_text()) for r in ("none", "weights"))
        assert one == other


def test_a_rank_that_dies_is_missed_in_the_next_pass(crew: Crew, tmp_path: Path) -> None:
    """The group starts again from the checkpoint and ends with the bits of a run that nothing happened to."""
    cluster = {"slots": 2, "shard": "weights", "patience": 20.0, "deadline": 60.0}
    crew.run(2, trained, recipe_of(tmp_path, "quiet", SFT, cluster))
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe_of(tmp_path, "run", SFT, cluster)))
    launcher = Forked(tmp_path, fault="stage.step_end:3@1")
    assert launcher.run() == 0, launcher.output
    (said,) = launcher.said
    assert "starting the 2 ranks again (1 of 3)" in said
    assert losses(tmp_path / "run") == losses(tmp_path / "quiet")
    one, other = final(tmp_path / "run"), final(tmp_path / "quiet")
    assert all(torch.equal(one[name], other[name]) for name in other)


def short_of_memory(words: list[str], changes: dict[str, str], output: Path) -> None:
    """A rank, the second of which runs out of memory in the middle of a pass."""
    if changes["RANK"] == "1":
        Learner._terms = mock.Mock(side_effect=torch.OutOfMemoryError)  # type: ignore[method-assign]
    lemma_rank(words, changes, output)


def test_one_rank_without_memory_ends_all_of_them(tmp_path: Path) -> None:
    """The first one is waiting inside a pass; nothing is started again."""
    cluster = {"slots": 2, "shard": "weights", "patience": 20.0, "deadline": 60.0}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe_of(tmp_path, "run", SFT, cluster)))
    launcher = Forked(tmp_path, program=short_of_memory)
    assert launcher.run() == 2
    told = "rank 1 ran out of memory, and with `shard: weights` a step is not repeated with smaller packs; lower"
    assert (launcher.output + "".join(launcher.said)).count(told) == 1


# --- what is refused -----------------------------------------------------------------------------------------------

RL: dict[str, Any] = {"kind": "rl", "steps": 1, "data": {"source": "rows.jsonl"}}
REFUSED: dict[str, dict[str, Any]] = {
    "the native engine of stages.stage": {"stages": {"stage": RL}},
    "the vllm engine of stages.stage": {"stages": {"stage": RL | {"rollout": {"engine": "vllm"}}}},
    "quantised weights": {"model": {"lora": {"r": 4}, "quantize": "4bit"}},
    "model.compile": {"model": {"compile": True}},
    "8-bit moments": {"stages": {"stage": SFT | {"optim": {"name": "adamw_8bit"}}}},
    "stages.stage.eval.benchmarks": {"stages": {"stage": SFT | {"eval": {"benchmarks": ["gsm8k"]}}}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_loaded(said: str, tmp_path: Path) -> None:
    content = recipe_of(tmp_path, "run", SFT, {"shard": "weights"}) | REFUSED[said]
    recipe = load_values(Recipe, content, [])
    with pytest.raises(UserError, match=r"^cluster\.shard: weights .*; (write|evaluate|let servers)") as caught:
        check_split(recipe.cluster, recipe.model, recipe.stages)
    assert said in str(caught.value)


def test_a_dry_run_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "1 + 1 ?", "answer": "2"}\n')
    stage = RL | {"data": {"source": str(rows)}}
    benchmark = {"name": "rows", "source": str(rows)}
    for engine, code in (("native", 2), ({"name": "vllm", "mode": "server"}, 0)):
        measured = {"benchmarks": [benchmark], "engine": engine}
        for one in (stage | {"rollout": {"engine": engine}}, SFT | {"eval": measured}):
            content = recipe_of(tmp_path, "run", one, {"shard": "weights"})
            content["model"] = {
                "tiny": TINY["tiny"] | {"hidden": 64, "heads": 2, "kv_heads": 1}
            }  # a size of heads that vLLM has
            (tmp_path / "recipe.yaml").write_text(json.dumps(content))
            assert main(["train", str(tmp_path / "recipe.yaml"), "--dry-run"]) == code
            assert ("leaves no whole weights" in capsys.readouterr().err) == (code == 2)
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 0
    assert "rows; at the start, at the end; vllm engine, at most 1,024 tokens" in " ".join(
        capsys.readouterr().out.split()
    )
