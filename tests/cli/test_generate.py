"""`lemma generate` on a real model: the built-in one, taught a single answer by heart."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import pytest
import torch

from lemma.api.model_of_run import format_to_ask_in
from lemma.cli import generate
from lemma.cli.parser import Parser
from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.data.question_file import read_questions
from lemma.formats import make_format
from lemma.formats.encode import encode_text
from lemma.formats.r1_zero import R1Zero
from lemma.models.load_model import load_for_inference
from lemma.reporting.streamed_words import Words

QUESTION = "how many stones ?"
R1 = {"name": "r1_zero", "preamble": False}
WORDS = " 5 + 4 </think> <answer> 9 </answer>"


def run(*argv: str) -> int:
    parser = Parser(prog="lemma")
    generate.add(parser.add_subparsers())
    args = parser.parse_args(["generate", *argv], argparse.Namespace(arguments=["generate", *argv]))
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
        "(cut off after 3 tokens: a larger --max-tokens allows more)\n"
        "no answer in the format r1_zero: the reasoning never ends, so no answer counts\n"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_words_are_seen_as_they_come(is_terminal: bool, learnt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        writes = 0

        def isatty(self) -> bool:
            return is_terminal

        def write(self, text: str) -> int:
            self.writes += 1
            return super().write(text)

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    run(str(learnt), QUESTION, "--max-tokens", "20")
    assert screen.getvalue() == f"{WORDS.strip()}\nanswer: 9\n"
    assert screen.writes > 8 if is_terminal else screen.writes > 1


def test_json_has_one_line_for_each_answer(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(learnt), QUESTION, "--max-tokens", "20", "--json", "--show-logprobs") == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["question"], row["text"], row["answer"], row["finish"]) == (QUESTION, WORDS.strip(), "9", "stop")
    assert row["tokens"] == len(row["ids"]) == 7 and abs(sum(row["logprobs"]) - row["logprob"]) < 1e-4
    arguments = ("--samples", "3", "--temperature", "2", "--top-p", "0.01", "--max-tokens", "20", "--json")
    assert run(str(learnt), QUESTION, *arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["sample"] for one in rows] == [0, 1, 2]
    assert {one["text"] for one in rows} == {WORDS.strip()}, "a narrow nucleus leaves the likeliest token"


def test_another_engine_says_the_same(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(learnt), QUESTION, "--max-tokens", "20", "--engine", "transformers") == 0
    assert capsys.readouterr().out == f"{WORDS.strip()}\nanswer: 9\n"


def test_nobody_who_just_talks_is_told_of_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tiny", QUESTION, "--max-tokens", "3") == 0
    out = capsys.readouterr().out
    assert "format" not in out and out.endswith("(cut off after 3 tokens: a larger --max-tokens allows more)\n")


def test_samples_belong_to_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def samples(seed: int) -> str:
        run("tiny", QUESTION, "--samples", "2", "--max-tokens", "8", "--seed", str(seed))
        return capsys.readouterr().out

    first, again, other = samples(1), samples(1), samples(2)
    assert first == again != other
    one, two = first.split("--- sample 2 of 2")
    assert one.splitlines()[1] != two.splitlines()[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.filterwarnings("ignore:the tokenizer has no tokens")
def test_a_conversation_knows_what_was_said(
    learnt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[Message]] = []
    messages = R1Zero.messages
    monkeypatch.setattr(
        R1Zero, "messages", lambda self, problem: asked.append(problem.messages) or messages(self, problem)
    )
    lines = [QUESTION, QUESTION, "x " * 600, "/new", QUESTION, "", "never read"]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(lines)))
    assert run(str(learnt), "--max-tokens", "20") == 0
    captured = capsys.readouterr()
    first, second, _, third = (tuple(messages) for messages in asked)
    answer = Message("assistant", "<think>" + WORDS.strip())
    assert first == third == (Message("user", QUESTION),)
    assert second == (Message("user", QUESTION), answer, Message("user", QUESTION))
    assert captured.out.count(WORDS.strip()) >= 2
    monkeypatch.setattr(sys, "stdin", Terminal(f"{QUESTION}\n\n"))
    assert run(str(learnt), "--max-tokens", "2") == 0
    assert "(cut off after 2 tokens: a larger --max-tokens allows more)" in capsys.readouterr().out
    assert "but the model takes 512; ask less; /new begins another conversation" in captured.err


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    learnt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    hear = Words.hear

    def interrupted(self: Words, *args: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        hear(self, *args)

    monkeypatch.setattr(Words, "hear", interrupted)
    monkeypatch.setattr(sys, "stdin", Terminal(f"{QUESTION}\n{QUESTION}\n"))
    assert run(str(learnt), "--max-tokens", "20") == 0
    out = capsys.readouterr().out
    assert "(stopped)" in out and out.split("(stopped)")[1].count(WORDS.strip()) == 1


def test_a_file_of_questions_is_answered_in_its_order(
    learnt: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"question": QUESTION}, {"messages": [{"role": "user", "content": "how many"}]}, {"question": QUESTION}]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert run(str(learnt), "--file", str(questions), "--max-tokens", "20") == 0
    parts = capsys.readouterr().out.split("=== question ")[1:]
    answer = f": {QUESTION}\n{WORDS.strip()}\nanswer: 9\n"
    assert [parts[0], parts[2]] == ["1 of 3" + answer, "3 of 3" + answer]
    assert parts[1].startswith("2 of 3: how many\n")
    plain = tmp_path / "questions.txt"
    plain.write_text(f"{QUESTION}\n\n{QUESTION}\n")
    assert run(str(learnt), "--file", str(plain), "--samples", "2", "--max-tokens", "20") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("===", "---"))] == [
        f"=== question 1 of 2: {QUESTION}", "--- sample 1 of 2", "--- sample 2 of 2",
        f"=== question 2 of 2: {QUESTION}", "--- sample 1 of 2", "--- sample 2 of 2",
    ]  # fmt: skip


def test_logprobs_of_every_token(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(str(learnt), QUESTION, "--max-tokens", "20", "--show-logprobs")
    lines = capsys.readouterr().out.splitlines()
    tokens = lines[1:-2]
    assert [line.split()[1] for line in tokens] == [repr(word) for word in WORDS.split()]
    values = [float(line.split()[0]) for line in tokens]
    assert all(-0.5 < value <= 0 for value in values)
    total, each = (float(word) for word in lines[-2].split() if word.startswith("-"))
    assert abs(total - sum(values)) < 1e-3 and abs(each - total / 7) < 1e-3
    assert lines[-2].endswith("7 tokens") and lines[-1] == "answer: 9"


@pytest.mark.parametrize("system", ["how many", ""])
def test_the_system_message_reaches_the_prompt(system: str) -> None:
    parser = Parser(prog="lemma")
    generate.add(parser.add_subparsers())
    args = parser.parse_args(["generate", "tiny", "x", "--format", "boxed", "--system", system])
    fmt, is_chosen = format_to_ask_in(args.model, None, args.format, args.system)
    assert fmt.system == system and is_chosen


@pytest.mark.filterwarnings("ignore:the tokenizer has no tokens")
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
        (("tiny", "x", "--file", "y"), "there are both a question and a file of questions"),
        (("tiny", "--file", "nowhere.txt"), "the file nowhere.txt is not there"),
        (("tiny",), "there is no question"),
    ],
)
def test_wrong_input_gets_one_sentence(argv: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(UserError) as caught:
        run(*argv)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no questions"),
        ('{"question": "a"}\n{"question": ', "q.jsonl:2: this is not JSON"),
        ('{"question": "a"}\n\n{"problem": "b"}', "q.jsonl:3: the row has neither a question nor messages"),
        ("[1]", "q.jsonl:1: the row has neither"),
        ('{"messages": [{"role": "user"}]}', "q.jsonl:1: the row has neither"),
    ],
)
def test_a_wrong_file_of_questions_gets_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_questions(path)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
