"""Rewards and graders of other systems, on every stored row of the originals' own scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lemma.core.types import Message, Problem
from lemma.grading import GradingService
from lemma.grading.compat import boxed_grader as boxed
from lemma.grading.compat import luffy_rewards as luffy
from lemma.grading.compat import verifiers
from lemma.rewards import RewardInput, make_reward
from lemma.rewards.xml_rewards import xml_answer

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).resolve().parents[1] / "reference" / "rewards.json").read_text(encoding="utf-8")
)["cases"]


def of(*variants: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["variant"].split(":")[0] in variants]


def item(completion: str, gold: str | None = None, tokens: int = 0) -> RewardInput:
    problem = Problem((Message("user", "How many?"),), () if gold is None else (gold,))
    return RewardInput(completion, problem, ids=range(tokens))


def value(spec: Any, completion: str, gold: str | None = None, tokens: int = 0) -> float | None:
    return make_reward(spec).score(item(completion, gold, tokens))


@pytest.mark.parametrize("case", of("gist_xml"))
def test_xml_rewards(case: dict[str, Any]) -> None:
    text, gold, want = case["inputs"]["completion"], case["inputs"]["answer"], case["outputs"]
    assert xml_answer(text) == want["extracted"]
    assert value({"name": "correctness", "compat": True}, text, gold) == want["correctness"]
    assert value({"name": "integer", "compat": True}, text) == want["int"]
    assert value("strict_format", text) == want["strict_format"]
    assert value("soft_format", text) == want["soft_format"]
    assert value({"name": "tag_count", "compat": True}, text) == pytest.approx(want["xmlcount"], abs=1e-9)
    if not case.get("original_bug"):
        assert value("tag_count", text) == pytest.approx(want["xmlcount"], abs=1e-9)


@pytest.mark.parametrize("case", of("working_out_tags"))
def test_working_out_rewards(case: dict[str, Any]) -> None:
    text, gold = case["inputs"]["completion"], case["inputs"]["answer"]
    names = {"exact": "exact_format", "approximate": "approximate_format", "answer": "answer", "numbers": "numbers"}
    for original, variant in (("unsloth", "notebook"), ("seed003", "repository")):
        want = case["outputs"][original]
        got = {key: value({"name": name, "variant": variant}, text, gold) for key, name in names.items()}
        assert got == {key: want[key] for key in names}
        assert sum(v for v in got.values() if v is not None) == pytest.approx(want["total"])


@pytest.mark.parametrize("case", of("r1_zero", "question_only"))
def test_boxed_rewards(case: dict[str, Any]) -> None:
    grader: Callable[..., Any] = boxed.r1_zero if case["variant"].startswith("r1_zero") else boxed.question_only
    for pace in ("fast", "slow"):
        got = grader(case["inputs"]["response"], case["inputs"]["gold"], pace == "fast")
        assert got == case["outputs"][pace], pace


@pytest.mark.parametrize("case", of("think_math_versions"))
def test_luffy_versions(case: dict[str, Any]) -> None:
    response, gold, want = case["inputs"]["response"], case["inputs"]["gold"], case["outputs"]
    for version in range(5):
        if isinstance(want[f"v{version}"], dict):
            with pytest.raises(TypeError):
                luffy.luffy_score(response, gold, version)
            assert luffy.luffy_score(response, gold, version, compat=False) == 1.0
        else:
            read = (
                version in (3, 4) and "\\%" in response
            )  # The scores were stored with antlr 4.11, which cannot read it.
            assert luffy.luffy_score(response, gold, version) == (1.0 if read else want[f"v{version}"]), version

    whole = "<think>\n" + response
    assert luffy.gsm8k_source(whole, gold) == want["gsm8k_source"]
    assert luffy.math_source(whole, gold) == want["hendrycks_math_source"]
    for pace in ("fast", "slow"):
        assert list(boxed.boxed_score(whole, gold, pace == "fast")) == want[f"boxed_grader_{pace}"], pace


@pytest.mark.parametrize("gold", ["0.5", "50", r"50\%", r"\frac12"])
def test_a_percentage_is_what_math_verify_reads(gold: str) -> None:
    from math_verify import parse, verify

    box = r"</think> \boxed{50\%}"
    assert verify(parse(f"${gold}$", parsing_timeout=None), parse(box, parsing_timeout=None), timeout_seconds=None)
    assert luffy.luffy_score(box, gold, 3) == luffy.luffy_score(box, gold, 4) == 1.0
    assert luffy.luffy_score(r"</think> \boxed{5\%}", gold, 4) == 0.0


@pytest.mark.parametrize("case", of("verifiers"))
def test_verifiers(case: dict[str, Any]) -> None:
    newer = {"string_f1_current": "string_f1", "puzzle_current": "puzzle"}
    for name, want in case["outputs"].items():
        label = case["inputs"]["label"]
        if name in ("max_length", "up_to_max_length"):
            tokens = case["inputs"]["num_tokens"]
            spec = {"name": "length", "shorter": name == "up_to_max_length"}
            assert value(spec, "", label, tokens) == pytest.approx(want, abs=1e-9), name
        else:
            got = verifiers.VERIFIERS[newer.get(name, name)](case["inputs"]["prediction"], label)
            assert got == pytest.approx(want, abs=1e-9), name


@pytest.mark.parametrize("case", of("soft_format", "think_format", "seed000_grpo"))
def test_think_formats(case: dict[str, Any]) -> None:
    want = case["outputs"]
    if case["variant"] == "soft_format":
        spec: Any = {"name": "think_answer_format", "soft": True, "value": 10.0}
        assert value(spec, case["inputs"]["response"]) == want["score"]
    elif case["variant"] == "think_format":
        assert value("think_format", case["inputs"]["completion"]) == want["score"]
    else:
        assert value({"name": "think_answer_format", "compat": True}, case["inputs"]["completion"]) == want["format"]


@pytest.mark.parametrize("case", of("soft_overlong", "repetition_penalty"))
def test_lengths(case: dict[str, Any]) -> None:
    params = case["params"]
    if case["variant"] == "soft_overlong":
        spec = {
            "name": "soft_overlong",
            "max_tokens": params["max_completion_len"],
            "margin": params["soft_punish_cache"],
        }
        got = [value(spec, "", tokens=length) for length in case["inputs"]["lengths"]]
    else:
        reward = make_reward({"name": "repetition", "ngram": params["ngram_size"], "penalty": params["max_penalty"]})
        problem = Problem((Message("user", "?"),))
        got = [reward.score(RewardInput("", problem, ids=ids)) for ids in case["inputs"]["completion_ids"]]
    assert got == pytest.approx(case["outputs"]["rewards"], abs=1e-9)


def test_originals_by_name_through_the_service() -> None:
    """The same scores where the graders run in a worker, as rewards ask them."""
    with GradingService(cpu_seconds=1.0) as service:
        assert service.compat("luffy_v3", "a</think>\\boxed{2\\sqrt2}", "\\sqrt{8}") == 1.0
        assert service.compat("luffy_v1", "a</think>\\boxed{3}", "4") == -0.5
        assert service.compat("boxed_slow", "\\boxed{2/4}", "1/2") == [{"formatted": True}, 1.0]
        assert service.compat("verifier_gsm8k", "It is -5", "-5", compat=False) == 1.0
        assert service.compat("verifier_gsm8k", "It is -5", "-5") == 0.0
        with pytest.raises(RuntimeError, match="luffy_v3: TypeError"):
            service.compat("luffy_v3", "a</think>\\boxed{2}", ["1", "2"])
        bomb = "a</think>\\boxed{\\prod_{k=1}^{19999} (k^2+1)}"
        assert service.compat("luffy_v3", bomb, "1") == 0.0
        assert service.counts["killed"] == 1
        assert service.compat("luffy_v3", "a</think>\\boxed{5}", "5") == 1.0


def test_without_compat_the_known_defects_are_repaired() -> None:
    think = "so </think>{}<answer> {} </answer>{}"
    for text in (think.format("\n", "16", ""), think.format(" ", "16", " trailing"), think.format("", "16", "\n")):
        assert boxed.r1_zero(text, "16", compat=False)["reward"] == 1.0
    assert boxed.r1_zero(think.format(" ", "x+a", ""), "x+c", compat=False)["reward"] == 0.0
    assert boxed.r1_zero(think.format(" ", "x+a", ""), "x+c", compat=True)["reward"] == 1.0
    assert boxed.r1_zero("no tags 16", "16", compat=False)["format_reward"] == 0.0
    assert boxed.question_only("\\fbox{5}", "5", compat=False)["reward"] == 1.0
    assert boxed.question_only("\\fbox{5}", "5", compat=True)["reward"] == 0.0
    assert not boxed.grade_boxed("5", "\\boxed{5")
    assert verifiers.gsm8k("it is -5", "-5", signed=True) == 1.0


def test_repetitive_texts_are_not_given_to_the_slow_comparison() -> None:
    assert not boxed.grade_boxed("12" * 100, "\\frac{" + "1" * 60 + "}{3}", fast=False)
    assert boxed._repeats("ab" * 100) and not boxed._repeats("The quick brown fox jumps over the lazy dog.")
