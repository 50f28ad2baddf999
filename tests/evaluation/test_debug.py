"""`lemma debug`: what a few groups say about a model and its sampling settings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lemma.cli import main
from lemma.engines.protocol import Sampling
from lemma.evaluation.diagnose import Checkup, Situation, diagnose, similarity
from lemma.formats.r1_zero import R1Zero
from lemma.models.tiny import tiny_tokenizer
from lemma.rollouts import Episode
from lemma.runs.run_options import taught_in

TOKENIZER = tiny_tokenizer()
PROMPT = "User: eva has 3 pens . how many ? Assistant: <think>"


def sample(
    text: str, number: int = 0, *, problem: str = "p", reward: float | None = 0.0, logprob: float = -0.5,
    finish: str = "stop", verdict: str = "wrong", prompt: str = PROMPT,
) -> Episode:  # fmt: skip
    """A sample of the tiny tokenizer's words, parsed as r1_zero; a finished one ends with the end token."""
    parsed = R1Zero().parse(text)
    ids = TOKENIZER.encode(text) + ([TOKENIZER.eos_token_id] if finish == "stop" else [])
    return Episode.at_once(
        key=("debug", problem),
        sample=number,
        problem_id=problem,
        context=np.array(TOKENIZER.encode(prompt), dtype=np.int32),
        ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), logprob, dtype=np.float32),
        kept=np.zeros(len(ids), dtype=np.float32),
        finish=finish,  # type: ignore[arg-type]
        text=text,
        reasoning=parsed.reasoning,
        answer=parsed.answer,
        faults=parsed.faults,
        format_ok=parsed.ok,
        verdict=verdict,  # type: ignore[arg-type]
        reward=reward,
    )


def answer(steps: str, value: int) -> str:
    return f"{steps} </think> <answer> {value} </answer>"


def good_groups() -> list[list[Episode]]:
    """Two problems, four samples each: all different, half of them right."""
    groups = []
    for problem in ("p", "q"):
        group = []
        for number in range(4):
            steps = " ; ".join(f"{number + 1} + {step + number} = {2 * number + step}" for step in range(4))
            right = number % 2 == 0
            text = answer(steps, number // 2 * 7 if right else 50 + number)
            group.append(
                sample(text, number, problem=problem, reward=float(right), verdict="right" if right else "wrong")
            )
        groups.append(group)
    return groups


def situation(max_tokens: int = 40, temperature: float = 1.0, **more: object) -> Situation:
    return Situation(R1Zero(), Sampling(max_tokens, temperature=temperature), TOKENIZER, "stages.grpo", 512, **more)  # type: ignore[arg-type]


def topic(diagnosis: Checkup, name: str) -> tuple[str, str, str]:
    found = next(finding for finding in diagnosis.findings if finding.topic == name)
    return found.level, found.text, found.advice or ""


def test_good_groups_need_nothing() -> None:
    diagnosis = diagnose(good_groups(), situation())
    assert [finding.level for finding in diagnosis.findings] == ["fine"] * 7
    assert diagnosis.advice == []
    assert diagnosis.numbers["distinct"] == 1.0 and diagnosis.numbers["right"] == 0.5
    assert diagnosis.numbers["dead"] == 0.0 and diagnosis.numbers["spread"] == 0.5
    assert diagnosis.numbers["round_trip"] == diagnosis.numbers["prompt_round_trip"] == 1.0


def test_each_reward_is_told_beside_their_sum() -> None:
    groups = good_groups()
    assert "mean 0.5, spread" in topic(diagnose(groups, situation()), "rewards")[1], "of one there is nothing to add"
    for number, one in enumerate(groups[0] + groups[1]):
        one.rewards = {"accuracy": one.reward, "style": None if number else 3.0}
    diagnosis = diagnose(groups, situation())
    assert "mean 0.5 (accuracy 0.5, style 3), spread" in topic(diagnosis, "rewards")[1]
    assert (diagnosis.numbers["reward/accuracy"], diagnosis.numbers["reward/style"]) == (0.5, 3.0)


def test_similarity_by_hand() -> None:
    """1 2 3 4 5 and 1 2 3 4 6 have the pieces 1234, 2345 and 1234, 2346: one of three in common."""
    one, two = sample("1 2 3 4 5", finish="length"), sample("1 2 3 4 6", finish="length")
    assert similarity([one, two]) == pytest.approx(1 / 3)
    assert similarity([one, one]) == 1.0


def test_completions_that_are_alike() -> None:
    group = [sample(answer("3 + 4 = 7", 7), n, reward=1.0, verdict="right") for n in range(4)]
    diagnosis = diagnose([group], situation())
    level, text, advice = topic(diagnosis, "diversity")
    assert level == "problem" and "25%" in text and "stages.grpo.rollout.temperature (now 1)" in advice
    level, _, advice = topic(diagnosis, "rewards")
    assert level == "problem" and "harder problems in stages.grpo.data" in advice


def test_a_format_that_is_never_met_wants_a_supervised_stage() -> None:
    group = [sample(f"{n} + 3 = {n + 3} ; pens {n} coins", n) for n in range(4)]
    diagnosis = diagnose([group], situation())
    level, text, advice = topic(diagnosis, "format")
    assert level == "problem" and "kept by 0%" in text and "the reasoning never ends" in text
    assert "supervised stage" in advice
    assert "supervised stage" in topic(diagnosis, "rewards")[2]
    taught = diagnose([group], situation(taught_in="sft"))
    for name in ("format", "rewards"):
        assert "train stage sft longer" in topic(taught, name)[2]
    assert not any("in front" in sentence for sentence in taught.advice)


def test_the_stage_that_teaches_is_found_through_others() -> None:
    kinds = {"sft": "supervised", "dpo": "preference", "rl": "rl"}
    stages = {name: SimpleNamespace(kind=kind, start_from=None) for name, kind in kinds.items()}
    assert [taught_in(stages, name) for name in (*stages, "other")] == [None, "sft", "sft", None]  # type: ignore[arg-type]


def test_each_setting_is_advised_once() -> None:
    group = [sample(answer("3 + 4 = 7", 7), n, reward=0.5, logprob=-0.001) for n in range(4)]
    advice = diagnose([group], situation()).advice
    assert sum("raise stages.grpo.rollout.temperature" in sentence for sentence in advice) == 1


@pytest.mark.parametrize(
    ("limit", "words"), [(20, "raise stages.grpo.rollout.max_tokens (now 20)"), (600, "context of 512")]
)
def test_completions_that_are_cut_off(limit: int, words: str) -> None:
    group = [sample(answer(f"{n} + 1", n), n, reward=float(n > 1)) for n in range(2)]
    group += [sample(f"{n} + 1 ; 2 = 3 ; 4 + {n}", n, finish="length") for n in range(2, 4)]
    level, text, advice = topic(diagnose([group], situation(limit)), "length")
    assert level == "note" and "50% are cut off" in text and words in advice


def test_completions_that_are_nearly_all_cut_off_say_nothing_about_the_format() -> None:
    group = [sample(f"{n} + 1 ; 2 = 3 ; 4 + {n}", n, finish="length") for n in range(4)]
    diagnosis = diagnose([group], situation(20))
    level, text, advice = topic(diagnosis, "format")
    assert level == "note" and "nearly all completions are cut off" in text and not advice
    assert diagnosis.advice[0].startswith("raise stages.grpo.rollout.max_tokens (now 20); if they still do not end")
    assert topic(diagnosis, "rewards")[2] == topic(diagnosis, "length")[2] == diagnosis.advice[0]
    assert "teach the model to end" in topic(diagnose([group], situation(600)), "length")[2], "the context is full"


def test_a_model_that_goes_on_after_its_answer() -> None:
    group = [sample(f"{answer(str(n), n)} #### {n}", n, reward=float(n % 2)) for n in range(4)]
    level, _, advice = topic(diagnose([group], situation()), "ends")
    assert level == "note" and "closing tag" in advice


@pytest.mark.parametrize(
    ("logprob", "level", "words"), [(-4.0, "problem", "lower"), (-0.001, "note", "raise"), (-0.4, "fine", "")]
)
def test_entropy(logprob: float, level: str, words: str) -> None:
    groups = good_groups()
    for one in groups[0] + groups[1]:
        one.logprobs[:] = logprob
    found, _, advice = topic(diagnose(groups, situation()), "entropy")
    assert found == level and words in advice


@pytest.mark.parametrize("compares", [False, True])
def test_one_sample_of_each_problem(compares: bool) -> None:
    """Eight problems with one sample each, half of them right: nothing is wrong, and no group can be judged."""
    groups = [[one] for group in good_groups() for one in group]
    diagnosis = diagnose(groups, situation(compares=compares))
    assert [finding.level for finding in diagnosis.findings] == ["fine"] * 7 and diagnosis.advice == []
    assert "one sample of each problem cannot show it" in topic(diagnosis, "diversity")[1]
    assert "spread over all samples 0.5" in topic(diagnosis, "rewards")[1]
    assert not {"distinct", "similarity", "dead", "spread"} & set(diagnosis.numbers)
    for (one,) in groups:
        one.reward = 0.0
    level, text, advice = topic(diagnose(groups, situation(compares=compares)), "rewards")
    assert level == "problem" and "all samples have the same reward" in text and "rewards" in advice
    for (one,) in groups:
        one.verdict = "wrong"
    advice = topic(diagnose(groups, situation(compares=compares)), "rewards")[2]
    assert advice == "take easier problems in stages.grpo.data: nearly all answers are wrong"


def test_groups_that_no_algorithm_compares_are_never_dead() -> None:
    """Each problem has one reward for all of its samples; with a critic the difference between problems teaches."""
    groups = good_groups()
    for number, group in enumerate(groups):
        for one in group:
            one.reward = float(number)
    level, text, _ = topic(diagnose(groups, situation()), "rewards")
    assert level == "problem" and "100% of the groups have one reward for all" in text
    level, text, _ = topic(diagnose(groups, situation(compares=False)), "rewards")
    assert level == "fine" and "spread over all samples 0.5" in text and "groups" not in text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_advice_never_contradicts_itself(temperature: float, alike: bool, size: int) -> None:
    """Unlikely tokens, equal rewards, and completions that are alike or not: the temperature goes one way."""
    groups = good_groups()
    for group in groups:
        for one in group:
            one.reward = 0.5
            one.logprobs[:] = -4.0
    groups = [[group[0]] * 4 if alike else group for group in groups]
    diagnosis = diagnose([group[:size] for group in groups], situation(temperature=temperature))
    raised = any("raise stages.grpo.rollout.temperature" in advice for advice in diagnosis.advice)
    lowered = any("lower stages.grpo.rollout.temperature" in advice for advice in diagnosis.advice)
    assert not (raised and lowered) and lowered == (temperature > 0 and not (alike and size > 1))
    assert raised == (size > 1 and (alike or temperature == 0))


def test_words_that_the_tokenizer_does_not_know() -> None:
    group = [sample(answer(str(n), n), n, prompt="User: Natalia sold clips . Assistant: <think>") for n in range(3)]
    diagnosis = diagnose([group], situation())
    level, text, advice = topic(diagnosis, "tokens")
    assert level == "problem" and "43%" in text and "model.tokenizer" in advice
    assert diagnosis.numbers["prompt_round_trip"] == 1.0


RECIPE = """
run: {device: cpu}
format: {name: r1_zero, preamble: false}
stages:
  grpo:
    kind: rl
    algorithm: {name: grpo, group_size: 4}
    rollout: {temperature: 0.9, max_tokens: 24}
    data: {source: arithmetic, arithmetic: {count: 50}}
"""
SFT = """
run: {device: cpu}
format: {name: r1_zero, preamble: false}
stages:
  sft: {steps: 10, data: {source: arithmetic, arithmetic: {count: 50}}}
"""


def debug(recipe: str, folder: Path, *more: str) -> dict[str, object]:
    (folder / "recipe.yaml").write_text(recipe)
    out = folder / "out.json"
    assert main(["debug", "tiny", "--recipe", str(folder / "recipe.yaml"), "--json", str(out), *more]) == 0
    return dict(json.loads(out.read_text()))


def test_the_command_on_an_untrained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = RECIPE.replace("kind: rl", "kind: rl\n    rewards: [accuracy, {name: format, weight: 0.1}]")
    found = debug(both, tmp_path, "--groups", "3", "--show", "1")
    said = capsys.readouterr().out
    assert "3 problems x 4 samples at temperature 0.9, at most 24 tokens" in said
    assert "BAD  format" in said and "kept by 0%" in said and "--- arithmetic/" in said
    assert "mean 0 (accuracy 0, format 0), spread" in said and "24 tokens, reward 0 (accuracy 0, format 0)\n" in said
    assert any("supervised stage" in advice for advice in found["advice"])  # type: ignore[attr-defined]
    assert found["numbers"]["samples"] == 12  # type: ignore[index]


PPO = RECIPE.replace("algorithm: {name: grpo, group_size: 4}", "algorithm: {name: ppo}")


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_the_command_on_a_critic_s_recipe(temperature: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PPO takes one sample of a problem by default, and compares none."""
    found = debug(PPO, tmp_path, "--groups", "3", "--show", "0", "--temperature", temperature)
    said = capsys.readouterr().out
    assert f"3 problems x 1 sample at temperature {temperature}" in said
    assert "ok   diversity  one sample of each problem cannot show it" in said
    assert "of the groups" not in said and "group_size" not in said
    advice = " ".join(found["advice"])  # type: ignore[arg-type]
    assert "raise stages.grpo.rollout.temperature" not in advice
    assert ("lower stages.grpo.rollout.temperature" in advice) == (temperature != "0")
    debug(PPO, tmp_path, "--groups", "2", "--group-size", "2", "--show", "0")
    said = capsys.readouterr().out
    assert "of a group's completions differ" in said and "spread over all samples" in said


@pytest.mark.parametrize(
    ("algorithm", "compares"),
    [
        ("grpo", True),
        ("rloo", True),
        ("luffy", True),
        ("ppo", False),
        ("reinforce", False),
        ("expert_iteration", False),
    ],
)
def test_which_algorithms_compare(algorithm: str, compares: bool) -> None:
    from lemma.algorithms import ALGORITHMS

    assert ALGORITHMS[algorithm]().compares == compares


def test_the_command_on_a_recipe_without_reinforcement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    debug(SFT, tmp_path, "--groups", "2", "--group-size", "3", "--temperature", "0.0001", "--max-tokens", "12")
    said = capsys.readouterr().out
    assert "2 problems x 3 samples at temperature 0.0001, at most 12 tokens" in said
    assert "BAD  diversity" in said and "stages.rl.rollout.temperature (now 0.0001)" in said


def test_prompts_that_the_stage_would_leave_out_are_not_asked(tmp_path: Path) -> None:
    """Half of the rows are short; the limits of the recipe, or of the context, leave only those."""
    rows = [
        {"question": "eva has 3 pens . " + "buys 2 . " * (n % 2 * 40) + "how many ?", "answer": "5"} for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = RECIPE.replace("{source: arithmetic, arithmetic: {count: 50}}", f"{{source: {tmp_path / 'rows.jsonl'}}}")
    longest = {}
    for name, more in {
        "all": (),
        "limit": ("--set", "stages.grpo.data.prompt_length.max_tokens=40"),
        "percentile": ("--set", "stages.grpo.data.prompt_length.percentile=0.4"),
        "context": ("--max-tokens", "480"),
    }.items():
        found = debug(recipe, tmp_path, "--groups", "12", "--group-size", "1", *more)
        assert found["numbers"]["groups"] == 12  # type: ignore[index]
        longest[name] = found["numbers"]["longest_prompt"]  # type: ignore[index]
    assert longest["all"] > 120
    assert longest["limit"] == longest["percentile"] == longest["context"] < 40


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--stage", "grp"), "the recipe has no stage 'grp'; did you mean 'grpo'?"),
        (("--groups", "0"), "--groups is 0; write 1 or more"),
        (("--max-tokens", "600"), "leave no room for 600 more in the model's context of 512; lower data.prompt_length"),
        (("--set", "stages.grpo.data.prompt_length.max_tokens=3"), "are longer than 3 tokens"),
        (("--set", "stages.grpo.rollout.min_tokens=9", "--max-tokens", "8"), "rollout.min_tokens is 9, above the 8"),
    ],
)
def test_mistakes(more: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert main(["debug", "tiny", "--recipe", str(tmp_path / "r.yaml"), *more]) == 2
    assert words in capsys.readouterr().err


def test_a_recipe_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "tiny"]) == 2
    assert "there is no recipe; name one with --recipe" in capsys.readouterr().err
