"""The reinforcement stage from a recipe to a finished model: its references, what is masked, what is left out, and what
stops it."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lemma.algorithms import ALGORITHMS
from lemma.core import faults
from lemma.core.errors import UserError
from lemma.core.events import Said
from lemma.core.types import Trajectory
from lemma.engines.native.engine import NativeEngine
from lemma.formats import make_format
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.load_model import build_policy
from lemma.models.model_options import LoraOptions, ModelOptions, TinyOptions
from lemma.rollouts import Journal, read_episodes
from lemma.runs.run import train
from lemma.stages import building
from lemma.stages.reference import AdaptersOff, live_reference
from lemma.stages.reinforcement import rl_parts
from tests.algorithms import toy
from tests.models.small import CPU

SMALL = {"tiny": {"hidden": 16, "layers": 1, "feed_forward": 16, "heads": 2, "kv_heads": 1, "context": 32}}


def small_stage(folder: Path, algorithm: dict[str, Any] | str = "grpo", **changes: Any) -> dict[str, Any]:
    """Two steps of a random model that is paid for parity."""
    base = {"rewards": [toy.PARITY], "steps": 2, "batch": {"problems": 4, "token_budget": 256}}
    base["rollout"] = {"max_tokens": 6}
    return toy.reinforcement(folder, algorithm, **(base | changes))


def run(folder: Path, algorithm: dict[str, Any] | str = "grpo", **changes: Any) -> toy.Toy:
    world = toy.Toy(folder)
    model = changes.pop("model", {})
    world.train(small_stage(folder, algorithm, **changes), **(SMALL | model))
    return world


def journal(world: toy.Toy, step: int) -> Path:
    return world.run / "stages" / "toy" / "journal" / f"step-{step:06d}.jsonl"


# --- references ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoraOptions(r=2)], ids=["full", "lora"])
def test_the_reference_is_the_model_that_the_stage_started_from(lora: LoraOptions | None) -> None:
    options = ModelOptions(tiny=TinyOptions(**SMALL["tiny"]), lora=lora)
    policy = build_policy(options, CPU, 3)
    learner = Learner(policy, OptimOptions(), token_budget=256, total_steps=1)
    reference = live_reference(
        SimpleNamespace(
            name="toy",
            model=options,
            device=CPU,
            seed=3,
            learner_seed=3,
            start_from=None,
            shard="none",
            waiting=nullcontext,
        ),
        policy,
        learner,
        None,
    )  # type: ignore[arg-type]
    assert isinstance(reference, AdaptersOff) == (lora is not None), (
        "a second copy only where there is no adapter to switch off"
    )
    items = [Trajectory(ids_T=np.arange(3, 20), loss_mask_T=np.arange(17) > 4)]
    before = learner.score(items)[0]
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.1)
    assert np.array_equal(reference.scores(items)[0], before)
    assert np.abs(learner.score(items)[0] - before).max() > 1e-3, "and the policy is another one again"


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "lora"])
def test_a_kl_of_the_first_update_is_zero_and_grows(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    world = run(tmp_path, {"name": "grpo", "kl": 0.1}, model={"lora": lora}, steps=3)
    first, *later = [row["kl"] for row in world.rows()]
    assert first == 0.0 and all(value > 1e-6 for value in later)


@pytest.mark.parametrize("model", [{}, {"lora": {"r": 2}}], ids=["full", "lora"])
def test_a_reference_of_its_own(model: dict[str, Any], tmp_path: Path) -> None:
    """Another model than the start, so the first KL is not zero; the start itself gives the usual numbers."""
    other = build_policy(ModelOptions(**(toy.MODEL | SMALL)), CPU, 9)
    start = build_policy(ModelOptions(**(toy.MODEL | SMALL)), CPU, 1)
    rows = {}
    for name, policy in (("other", other), ("start", start)):
        policy.save(tmp_path / name)
        named = {"reference_model": {"path": str(tmp_path / name)}}
        (tmp_path / f"run-{name}").mkdir()
        rows[name] = run(tmp_path / f"run-{name}", {"name": "grpo", "kl": 0.1}, model=model, **named).rows()
    (tmp_path / "plain").mkdir()
    plain = run(tmp_path / "plain", {"name": "grpo", "kl": 0.1}, model=model).rows()
    assert rows["other"][0]["kl"] > 1e-4
    assert [row["kl"] for row in rows["start"]] == pytest.approx([row["kl"] for row in plain], rel=1e-4)


def test_a_reference_that_is_replaced_at_every_step_is_the_policy_before_it(tmp_path: Path) -> None:
    world = run(tmp_path, {"name": "grpo", "kl": 0.1}, steps=3, reference_model={"every": 1, "mix": 1})
    assert [row["kl"] for row in world.rows()] == [0.0, 0.0, 0.0]


def test_a_critic_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = build_policy(ModelOptions(tiny=TinyOptions(**SMALL["tiny"])), CPU, 9)
    other.save(tmp_path / "other")
    wanted = other.backbone.state_dict()
    build, first = building.build_critic, {}

    def watched(*args: Any) -> Any:
        critic = build(*args)
        first.update({name: tensor.clone() for name, tensor in critic.backbone.state_dict().items()})
        return critic

    monkeypatch.setattr(building, "build_critic", watched)
    named = run(tmp_path, {"name": "ppo", "value_path": str(tmp_path / "other")}).rows()
    assert first.keys() == wanted.keys() and all(torch.equal(first[name], wanted[name]) for name in wanted)
    (tmp_path / "usual").mkdir()
    usual = run(tmp_path / "usual", "ppo").rows()
    assert not all(torch.equal(first[name], wanted[name]) for name in wanted)
    assert named[0]["critic/loss"] != usual[0]["critic/loss"] and named[0]["reward/mean"] == usual[0]["reward/mean"]


def test_models_beside_the_policy_have_its_tokens_and_are_there(tmp_path: Path) -> None:
    words = {**SMALL["tiny"], "words": ["<other>"]}
    build_policy(ModelOptions(tiny=TinyOptions(**words)), CPU, 9).save(tmp_path / "other")
    for algorithm, changes, what in (
        ({"name": "grpo", "kl": 0.1}, {"reference_model": {"path": str(tmp_path / "other")}}, "reference_model.path"),
        ({"name": "ppo", "value_path": str(tmp_path / "other")}, {}, "algorithm.value_path"),
    ):
        with pytest.raises(UserError, match=rf"the tokens of .*other are not those of the policy; .*as {what}"):
            run(tmp_path, algorithm, **changes)
    with pytest.raises(UserError, match=r"stage toy: there is no model folder .*absent"):
        run(tmp_path, {"name": "ppo", "value_path": str(tmp_path / "absent")})


# --- what is learnt from ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncated", ["keep", "mask"])
def test_tokens_that_are_learnt_are_those_of_the_journal(truncated: str, tmp_path: Path) -> None:
    stage = {"truncated": truncated, "rollout": {"max_tokens": 28}, "steps": 1}
    world = run(tmp_path, {"name": "reinforce", "group_size": 12}, **stage)
    samples = list(read_episodes(journal(world, 1)))
    finishes = [sample.finish for sample in samples]
    assert "length" in finishes and "stop" in finishes
    learnt = [sample for sample in samples if truncated == "keep" or sample.finish != "length"]
    live = {sample.key for sample in learnt if sample.reward}
    assert world.rows()[0]["trained_tokens"] == sum(len(sample.ids) for sample in learnt if sample.key in live) > 0


def test_where_rewards_do_not_differ_nothing_is_computed_and_it_is_said(tmp_path: Path) -> None:
    world = run(tmp_path, "grpo", rewards=[{"name": "length", "weight": 0.0}])
    rows = world.rows()
    assert [(row["updates"], row["groups/dead"], row["trained_tokens"]) for row in rows] == [(0.0, 1.0, 0.0)] * 2
    start = build_policy(ModelOptions(tiny=TinyOptions(**SMALL["tiny"])), CPU, 1)
    final = load_file(world.final / "model.safetensors")
    assert all(torch.equal(final[name], p) for name, p in start.parameters().items())
    assert any("`algorithm.group_size`" in text for text in world.warnings())


@pytest.mark.parametrize("name", [*ALGORITHMS, "entropy_target"])
def test_a_step_without_any_reward_changes_nothing(name: str, tmp_path: Path) -> None:
    """As where every verdict is unknown: no group has a trajectory, and no algorithm stumbles."""
    options: dict[str, Any] = {"name": name} if name in ALGORITHMS else {"name": "grpo", "entropy_target": 1.0}
    world = run(tmp_path, options, rewards=[toy.NOTHING], steps=1)
    (row,) = world.rows()
    assert row["updates"] == 0.0 and row["unscored"] == row["samples"] > 0
    assert any("have no reward" in text for text in world.warnings())


@pytest.mark.parametrize("name", ["grpo", "luffy", "ppo", "expert_iteration"])
def test_engine_and_learner_agree_where_the_support_is_cut(name: str, tmp_path: Path) -> None:
    options = {"name": name} | ({"group_size": 2} if name == "ppo" else {})
    options |= {"threshold": 0.5} if name == "expert_iteration" else {}
    world = run(tmp_path, options, rollout={"max_tokens": 6, "top_p": 0.7, "min_tokens": 3, "temperature": 0.7})
    assert all(0 < row["mismatch/max"] < 1e-4 for row in world.rows())


def test_grading_has_its_own_time(tmp_path: Path) -> None:
    world = run(tmp_path, rewards=[toy.SLOW], steps=1)
    (line,) = (world.run / "metrics.jsonl").read_text().splitlines()
    timings = json.loads(line)["timings"]
    assert timings["grade_seconds"] >= 32 * 0.01
    assert 0 < timings["generate_seconds"] < timings["seconds"] - timings["grade_seconds"]


# --- what stops a run ------------------------------------------------------------------------------------------------


def test_samples_end_where_the_model_says_that_turns_end(tmp_path: Path) -> None:
    """Not only at the tokenizer's end of sequence; and that token is no part of the text."""
    (tmp_path / "first").mkdir()
    first = run(tmp_path / "first", steps=1)
    model = Path(shutil.copytree(first.final, tmp_path / "model"))
    settings = model / "generation_config.json"
    common = [int(token) for sample in read_episodes(journal(first, 1)) for token in sample.ids]
    other = max(set(common), key=common.count)
    ends = json.loads(settings.read_text())["eos_token_id"]
    settings.write_text(json.dumps({"eos_token_id": [ends, other]}))
    world = toy.Toy(tmp_path, model)
    world.train(small_stage(tmp_path, steps=1))
    samples = list(read_episodes(journal(world, 1)))
    assert not any(other in sample.ids[:-1] for sample in samples)
    ended = [sample for sample in samples if sample.ids[-1] == other]
    assert ended and all(sample.finish == "stop" for sample in ended)
    word = build_policy(ModelOptions(path=str(model)), CPU, 0).tokenizer.decode([other])
    assert not any(sample.text.endswith(word) and len(sample.ids) == 1 for sample in ended)


def test_a_models_dropout_is_off(tmp_path: Path) -> None:
    """Otherwise the learner would not find the probabilities that its samples were drawn with."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = build_policy(ModelOptions(tiny=TinyOptions(**SMALL["tiny"])), CPU, 0).tokenizer
    shape = {"vocab_size": len(tokenizer), "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**shape, resid_pdrop=0.3, eos_token_id=tokenizer.eos_token_id)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    world = toy.Toy(tmp_path, tmp_path / "model")
    rollout = {"max_tokens": 6, "engine": "transformers"}
    (row, *_) = world.train(small_stage(tmp_path, steps=1, rollout=rollout))
    assert row["mismatch/max"] < 1e-3
    assert "toy: the model's dropout is off in stages of kind rl" in [
        e.text for e in world.events if isinstance(e, Said)
    ]


WIDE = {"tiny": SMALL["tiny"] | {"context": 1024}}
LONG_EVALUATION = {"benchmarks": ["arithmetic"], "limit": 2, "max_tokens": 900, "at_start": False}


def test_the_cache_holds_what_the_benchmarks_need(tmp_path: Path) -> None:
    """A small batch of short samples, and an evaluation with much longer ones on the same engine."""
    batch = {"problems": 1, "token_budget": 256}
    world = run(tmp_path, {"name": "grpo", "group_size": 2}, batch=batch, eval=LONG_EVALUATION, steps=1, model=WIDE)
    assert "evaluation/arithmetic/answer_accuracy" in world.rows()[-1] | world.rows()[0]


def test_a_cache_that_no_benchmark_fits_into_is_refused_before_the_first_step(tmp_path: Path) -> None:
    rollout = {"max_tokens": 6, "engine": {"name": "native", "cache_tokens": 512}}
    with pytest.raises(UserError, match=r"needs 9\d\d tokens of the engine's cache, which holds \d+; lower `eval.max_"):
        run(tmp_path, eval=LONG_EVALUATION, rollout=rollout, model=WIDE)
    assert not journal(toy.Toy(tmp_path), 1).exists()


def test_a_mismatch_above_the_limit_stops_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's journal says of one token something else than the learner finds."""
    world = toy.Toy(tmp_path)
    recipe = world.recipe(small_stage(tmp_path), **SMALL)
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "rl.before_update:1:EIO")
    with pytest.raises(OSError):
        train(recipe, sink=world.events.append)
    monkeypatch.delenv("LEMMA_FAULT")
    samples = list(read_episodes(journal(world, 1)))
    data = json.loads(journal(world, 1).read_text().splitlines()[-1])["data"]
    book = Journal(journal(world, 1), data)
    book.clear()
    for sample in samples:
        sample.turns[0].logprobs = sample.turns[0].logprobs + np.float32(0.01)
        book.append(sample)
    book.finish()
    book.close()
    with pytest.raises(UserError, match=r"differ by 0\.01 at most, and rounding in fp32 explains 0\.0001"):
        train(recipe, sink=world.events.append)


def test_other_data_after_a_death_before_the_first_checkpoint_are_generated_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of the first step is complete, but about problems that are not there any more."""
    world = toy.Toy(tmp_path)
    recipe = world.recipe(small_stage(tmp_path, steps=1), **SMALL)
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "rl.before_update:1:EIO")
    with pytest.raises(OSError):
        train(recipe, sink=world.events.append)
    monkeypatch.delenv("LEMMA_FAULT")
    path = tmp_path / "questions.jsonl"
    path.write_text(path.read_text().replace("has", "wins"))
    train(recipe, sink=world.events.append)
    fresh = toy.Toy(tmp_path / "fresh")
    fresh.folder.mkdir()
    fresh.train({**small_stage(fresh.folder, steps=1), "data": {"source": str(path)}}, **SMALL)
    assert world.rows() == fresh.rows()


def test_an_engine_is_closed_though_the_stage_never_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[NativeEngine] = []
    monkeypatch.setattr(NativeEngine, "close", lambda engine: closed.append(engine))

    def fails(*parts: object) -> None:
        raise UserError("the journal cannot be opened")

    monkeypatch.setattr(rl_parts, "make_collector", fails)
    with pytest.raises(UserError, match="cannot be opened"):
        run(tmp_path)
    assert len(closed) == 2, "that of the probe, and the stage's own"


def test_min_tokens_that_no_prompt_leaves_room_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stage toy: rollout\.min_tokens is 40, but prompts leave room for 28 tokens"):
        run(tmp_path, rollout={"min_tokens": 40})


def test_luffy_needs_a_trace(tmp_path: Path) -> None:
    rows = tmp_path / "bare.jsonl"
    rows.write_text('{"question": "eva has pens ?", "answer": "1"}\n')
    with pytest.raises(UserError, match=r"no problem of its data has a teacher's trace, which luffy needs"):
        run(tmp_path, "luffy", data={"source": str(rows)})


def test_a_trace_continues_the_formats_own_prompt(tmp_path: Path) -> None:
    """A row may bring a prompt of its own; the policy answers the format's, so the trace must fit that one."""
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "User: eva Assistant:", "response": "<think> 1 </think> <answer> 1 </answer>", "ground_truth": "1"}
    rows.write_text(json.dumps(row) + "\n" + json.dumps(row | {"ground_truth": None}) + "\n")
    world = toy.Toy(tmp_path)
    stage = small_stage(
        tmp_path,
        {"name": "luffy", "group_size": 2},
        data={"source": str(rows), "verbatim": True},
        rewards=["accuracy"],
        steps=1,
    )
    recipe = world.recipe(stage | {"rollout": {"max_tokens": 9}, "batch": {"problems": 1}}, **SMALL)
    recipe = recipe.model_copy(update={"format": make_format({"name": "r1_zero", "preamble": False})})
    train(recipe, sink=world.events.append)
    trace = next(sample for sample in read_episodes(journal(world, 1)) if sample.origin == "teacher")
    assert trace.text == "1 </think> <answer> 1 </answer>" and trace.format_ok
    assert "1 of 2 rows have no answer to grade against and were left out" in world.warnings()
