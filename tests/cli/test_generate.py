"""`lemma generate` on a real model: the built-in one, taught a single answer by heart."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from lemma.cli import generate
from lemma.cli.parser import Parser
from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.formats import make_format
from lemma.formats.encode import encode_text
from lemma.models.load import load_for_inference

QUESTION = "how many stones ?"
R1 = {"name": "r1_zero", "preamble": False}
WORDS = " 5 + 4 </think> <answer> 9 </answer>"


def run(*argv: str) -> int:
    parser = Parser(prog="lemma")
    generate.add(parser.add_subparsers())
    args = parser.parse_args(["generate", *argv])
    return int(args.run(args))


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose model says WORDS after QUESTION, and after that never stops saying `marbles`."""
    run_dir = tmp_path_factory.mktemp("run")
    folder = run_dir / "stages" / "sft" / "final" / "merged"
    model, tokenizer = load_for_inference("tiny", "cpu")
    fmt = make_format(R1)
    prompt = encode_text(fmt.prompt(Problem((Message("user", QUESTION),)), tokenizer), tokenizer)
    ids = torch.tensor([[*prompt, *encode_text(WORDS + " marbles" * 4, tokenizer)]])
    assert tokenizer.unk_token_id not in ids
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(40):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert loss < 0.05, "the fixture did not learn its sentence"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (run_dir / "recipe.yaml").write_text("format: {name: r1_zero, preamble: false}\nstages: {sft: {}}\n")
    return run_dir


def test_a_run_speaks_in_its_own_format_and_stops_after_the_answer(
    learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(learnt), QUESTION, "--max-tokens", "20") == 0
    assert capsys.readouterr().out == f"{WORDS.strip()}\nanswer: 9\n"


def test_a_model_folder_inside_a_run_speaks_in_the_format_of_the_run(
    learnt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION + "\n"))
    assert run(str(learnt / "stages/sft/final/merged"), "-", "--max-tokens", "20") == 0
    assert capsys.readouterr().out.endswith("answer: 9\n")


def test_an_answer_that_does_not_come_is_explained(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(learnt), QUESTION, "--max-tokens", "3") == 0
    assert capsys.readouterr().out == (
        "5 + 4\n"
        "(cut off: no end within 3 tokens or the model's context)\n"
        "no answer in the format r1_zero: the reasoning never ends, so no answer counts\n"
    )


def test_a_terminal_sees_the_words_as_they_come(learnt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        writes = 0

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.writes += 1
            return super().write(text)

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    run(str(learnt), QUESTION, "--max-tokens", "20")
    assert screen.getvalue() == f"{WORDS.strip()}\nanswer: 9\n"
    assert screen.writes > 8


def test_samples_belong_to_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def samples(seed: int) -> str:
        run("tiny", QUESTION, "--samples", "2", "--max-tokens", "8", "--seed", str(seed))
        return capsys.readouterr().out

    first, again, other = samples(1), samples(1), samples(2)
    assert first == again != other
    one, two = first.split("--- sample 2 of 2")
    assert one.splitlines()[1] != two.splitlines()[1]


@pytest.mark.parametrize("system", ["how many", ""])
def test_the_system_message_reaches_the_prompt(system: str) -> None:
    parser = Parser(prog="lemma")
    generate.add(parser.add_subparsers())
    args = parser.parse_args(["generate", "tiny", "x", "--format", "boxed", "--system", system])
    assert generate._format(args, tokenizer=None).system == system


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("tiny", " "), "the question is empty"),
        (("tiny", "x", "--samples", "0"), "--samples is 0; write 1 or more"),
        (("tiny", "x", "--temperature", "nan"), "--temperature is nan; write 0 or more"),
        (("tiny", "x", "--samples", "2", "--temperature", "0"), "samples at temperature 0 are all the same"),
        (("tiny", "x", "--format", "boxd"), "there is no format 'boxd'; did you mean 'boxed'?"),
        (("./nowhere", "x"), "there is no model folder ./nowhere"),
        (("tiny", "x " * 600), "but the model takes 512"),
        (("tiny", "x", "--samples", "many"), "invalid int value: 'many'"),
    ],
)
def test_wrong_input_gets_one_sentence(argv: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        run(*argv)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
