"""Log-likelihoods of options by real weights, against a plain computation by transformers, text by text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lemma.evaluation.benchmarks import BENCHMARKS, Benchmark, Loaded, load_benchmark
from lemma.evaluation.option_likelihood import Weighed, log_likelihoods, rows_of, wording
from lemma.evaluation.results import make_report
from lemma.evaluation.shots import load_shots
from lemma.models.load_model import load_policy
from lemma.models.policy import Policy
from tests.real.questions import CHOICES

LoadArc = Callable[..., Loaded]


@pytest.fixture(scope="module")
def policy(smollm2: Path) -> Policy:
    return load_policy(str(smollm2), "cpu", "fp32")


@pytest.fixture
def arc(tmp_path: Path) -> LoadArc:
    rows = [
        {"id": question, "question": question, "choices": {"text": texts, "label": list("ABCD")}, "answerKey": right}
        for question, texts, right in CHOICES
    ]
    (tmp_path / "arc_challenge.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(**more: object) -> Loaded:
        benchmark = BENCHMARKS["arc_challenge"].model_copy(update={"scoring": "likelihood", **more})
        return load_benchmark(benchmark, data_dir=tmp_path)

    return load


def plainly(smollm2: Path, policy: Policy, questions: list[Weighed]) -> list[list[float]]:
    """One forward pass of transformers for each text, and a softmax."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    found = []
    for question in questions:
        before = len(policy.tokenizer.encode(question.context, add_special_tokens=False))
        sums = []
        for continuation in question.continuations:
            ids = policy.tokenizer(question.context + continuation, add_special_tokens=False, return_tensors="pt")
            with torch.no_grad():
                logprobs = model(**ids).logits[0].log_softmax(-1)
            targets = ids.input_ids[0, before:]
            sums.append(float(logprobs[before - 1 : -1].gather(1, targets[:, None]).sum()))
        found.append(sums)
    return found


@pytest.mark.parametrize("weighs", ["option", "letter"])
def test_sums_are_those_of_plain_transformers(smollm2: Path, policy: Policy, arc: LoadArc, weighs: str) -> None:
    loaded = arc(weighs=weighs)
    questions = [wording(loaded, problem) for problem in loaded.problems]
    ours, theirs = log_likelihoods(policy, questions), plainly(smollm2, policy, questions)
    for mine, plain in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, plain, atol=2e-3)
    rows = rows_of(loaded, questions, ours)
    for row, plain, problem, question in zip(rows, theirs, loaded.problems, questions, strict=True):
        lengths = [len(option) - 1 for option in question.continuations]
        per_character = [value / length for value, length in zip(plain, lengths, strict=True)]
        letters = "ABCDE"
        assert (row.verdict == "right") is (letters[int(np.argmax(plain))] in problem.golds)
        assert row.normalised is (letters[int(np.argmax(per_character))] in problem.golds)


def test_what_is_weighed_after_examples(tmp_path: Path) -> None:
    train = [{"question": f"Which {n}?", "choices": ["no", f"yes {n}"], "answer": 1, "subject": None} for n in range(3)]
    for name, rows in (("train", train), ("test", train[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for weighs, end in (("option", "Answer: yes {n}"), ("letter", "A. no\nB. yes {n}\nAnswer: B")):
        benchmark = Benchmark(name="mine", source=str(tmp_path / "test.jsonl"), scoring="likelihood", weighs=weighs)
        loaded, shots = load_benchmark(benchmark), load_shots(benchmark, 2, "text", None)
        asked = wording(loaded, loaded.problems[0], shots)
        first, second, question = asked.context.split("\n\n")
        for example in (first, second):
            number = example.partition("?")[0][-1]
            assert example.startswith(f"Question: Which {number}?") and example.endswith(end.format(n=number))
        assert question.startswith("Question: Which 0?") and question.endswith("Answer:")
        assert asked.continuations == ((" no", " yes 0") if weighs == "option" else (" A", " B"))


def test_accuracy_and_its_normalised_sister_stand_in_the_table(arc: LoadArc) -> None:
    loaded = arc()
    questions = [wording(loaded, problem) for problem in loaded.problems]
    # The shortest option is the likeliest, the longest the likeliest a character.
    sums = [[-1.0 - len(option) ** 0.5 for option in question.continuations] for question in questions]
    settings = {"arc_challenge": {"metric": "acc_norm", "ties": "average", "scoring": "likelihood"}}
    report = make_report({}, settings, {"arc_challenge": rows_of(loaded, questions, sums)})
    assert report.headline("arc_challenge")[0] == "acc_norm"
    lengths = [[len(choice.strip()) for choice in problem.choices] for problem in loaded.problems]
    golds = ["ABCDE".index(problem.golds[0]) for problem in loaded.problems]
    shortest = np.mean([int(np.argmin(own)) == gold for own, gold in zip(lengths, golds, strict=True)])
    longest = np.mean([int(np.argmax(own)) == gold for own, gold in zip(lengths, golds, strict=True)])
    scores = report.summaries["arc_challenge"].scores
    assert (scores["avg@1"].value, scores["acc_norm"].value) == (shortest, longest)
    assert shortest != longest
