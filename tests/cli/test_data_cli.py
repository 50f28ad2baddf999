from __future__ import annotations

import json
import subprocess
import sys

import pyarrow.parquet
import pytest

from lemma.cli import main
from lemma.core.types import Demonstration
from lemma.data.arithmetic import generate
from lemma.data.data_options import ArithmeticOptions, DataOptions, SourceOptions
from lemma.data.load_rows import load_items, load_problems
from tests.cli.test_download import lemma
from tests.formats.tokenizers_made_here import make_tokenizer
from tests.hub import Hub, serve
from tests.shared import shared


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run a command in a folder of its own; gives exit code, what it printed and what it complained of."""
    monkeypatch.chdir(tmp_path)

    def go(*arguments: str) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return go


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def items(path):
    return load_items(SourceOptions(source=str(path)))


CHOICE = {"question": "2+2?", "choices": ["3", "4"], "answer": "B"}
TRACE = {"problem": "2+2?", "generated_solution": "two twos", "expected_answer": "4"}
RESPONSE = {"prompt": "2+2? <think>", "response": " 4 </think> <answer> 4 </answer>", "ground_truth": "4"}
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "é\n?"}, {"role": "assistant", "content": "4"}]
PAIR = {"prompt": CHAT[:2], "chosen": "4", "rejected": "5"}
LABEL = {"prompt": "2+2?", "completion": "4", "label": True}
RLVR = {"messages": CHAT[:2], "ground_truth": ["4", "four"], "dataset": "math"}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz", ".json"])
@pytest.mark.parametrize("row", [CHOICE, TRACE, RESPONSE, {"messages": CHAT}, PAIR, LABEL, RLVR])
def test_prepared_rows_read_back_as_the_same_items(run, tmp_path, suffix, row):
    source = write(tmp_path / "same.jsonl", [row, row])
    to = tmp_path / "out" / f"same{suffix}"
    assert run("data", "prepare", "rows", source, "--to", to)[:2] == (0, f"{to}: 2 rows\n")
    assert items(to) == items(source)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("rows", [[{**PAIR, "prompt": "2+2?"}, PAIR], [LABEL, {**LABEL, "prompt": CHAT[:2]}]])
def test_short_and_long_conversations_fit_one_file(run, tmp_path, suffix, rows):
    source = write(tmp_path / "same.jsonl", rows)
    to = tmp_path / "out" / f"same{suffix}"
    assert run("data", "prepare", "rows", source, "--to", to)[0] == 0
    assert items(to) == items(source)


def test_plain_pairs_fit_a_csv_file_and_others_are_told_what_does(run, tmp_path):
    pairs = [
        write(tmp_path / f"{n}.jsonl", [{**PAIR, "prompt": prompt}]) for n, prompt in enumerate(("2+2?", CHAT[:2]))
    ]
    assert run("data", "prepare", "rows", pairs[0], "--to", "0.csv")[0] == 0
    assert items("0.csv") == items(pairs[0])
    assert "a cell cannot hold the list in 'prompt'" in run("data", "prepare", "rows", pairs[1], "--to", "b.csv")[2]
    odd = [
        {**luffy_row(n, "<think>\na</think>\nb"), "extra_info": {"index": index}} for n, index in enumerate((1, "x"))
    ]
    source = write(tmp_path / "odd.jsonl", odd)
    said = run("data", "prepare", "luffy", source, "--complement", source, "--to", "luffy")[2]
    assert "openr1.parquet: the rows do not fit one table: " in said and said.endswith("; write .jsonl\n")


def test_arithmetic_as_csv_reads_back(run, tmp_path):
    to = tmp_path / "sums.csv"
    code, _, _ = run("data", "prepare", "rows", "arithmetic", "--to", to, "--split", "test", "--set", "count=20",
                     "--set", "arithmetic.operations=2")  # fmt: skip
    assert code == 0
    assert items(to) == generate(ArithmeticOptions(operations=2), "test", count=20)


def test_prepare_samples_with_the_seed(run, tmp_path):
    source = write(tmp_path / "a.jsonl", [{"problem": str(n), "answer": "1"} for n in range(50)])

    def drawn(seed):
        assert run("data", "prepare", "rows", source, "--to", "b.jsonl", "--set", "count=5", "--seed", seed)[0] == 0
        return [problem.question for problem in items("b.jsonl")]

    assert drawn(1) == drawn(1) != drawn(2) and len(drawn(3)) == 5


def test_only_correct_responses_are_kept(run, tmp_path):
    answers = ["4", "5", r"\boxed{4}", " $4$ "]
    rows = [{**RESPONSE, "response": f"x </think> <answer>{answer}</answer>"} for answer in answers]
    source = write(tmp_path / "sft.jsonl", rows)
    code, out, _ = run("data", "prepare", "correct", source, "--to", "correct.jsonl")
    assert code == 0 and "correct.jsonl: 3 of 4 rows" in out
    assert [item.response for item in items("correct.jsonl")] == [
        row["response"] for row in rows if "5" not in row["response"]
    ]
    wrong = write(tmp_path / "wrong.jsonl", rows[1:2])
    assert run("data", "prepare", "correct", wrong, "--to", "none.jsonl")[2].startswith(
        "lemma: error: none of the 1 responses gives the right answer"
    )
    assert not (tmp_path / "none.jsonl").exists()
    other = run("data", "prepare", "correct", source, "--to", "none.jsonl", "--format", "xml")[2]
    assert "3 of the 4 responses are right, but none keeps the format xml" in other


@pytest.mark.realdata
def test_the_published_traces_keep_most_of_their_rows(run):
    source = shared("data", "traces", "math_r1zero_sft.jsonl.gz")
    code, out, _ = run("data", "prepare", "correct", source, "--to", "correct.parquet", "--set", "count=300")
    assert code == 0
    kept = items("correct.parquet")
    assert f"{len(kept)} of 300 rows" in out and 0.8 * 300 < len(kept) < 300
    assert all(item.prompt and item.response for item in kept)
    strict = ["--set", "count=300", "--format", "{name: r1_zero, strict_space: true}"]
    assert run("data", "prepare", "correct", source, "--to", "strict.jsonl", *strict)[0] == 0
    chosen = items("strict.jsonl")
    assert 0.6 * 300 < len(chosen) < len(kept) and all("</think> <answer>" in item.response for item in chosen)


def luffy_row(number, target):
    return {
        "data_source": "openr1",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": f"{number}?"}],
        "target": [{"role": "assistant", "content": target}] if target else None,
        "ability": "math",
        "reward_model": {"ground_truth": str(number), "style": "rule"},
        "extra_info": {"index": number, "split": "default"},
    }


def test_luffy_rows_come_out_as_they_went_in(run, tmp_path):
    training = [luffy_row(n, f"<think>\nhm </think>\n\\boxed{{{n}}}" if n else None) for n in range(3)]
    source = write(tmp_path / "a.jsonl", training)
    other = write(tmp_path / "b.jsonl", [luffy_row(9, None)])
    code, out, _ = run("data", "prepare", "luffy", source, "--complement", other, "--to", "data")
    assert code == 0
    assert out.splitlines() == [
        "data/openr1.parquet: 3 rows",
        "data/openrlhf_sft/train.jsonl: 2 rows",
        "data/openr1.complement.parquet: 1 rows",
    ]
    assert pyarrow.parquet.read_table("data/openr1.parquet").to_pylist() == training
    (complement,) = pyarrow.parquet.read_table("data/openr1.complement.parquet").to_pylist()
    assert complement == luffy_row(9, None)
    sft = [json.loads(line) for line in open("data/openrlhf_sft/train.jsonl", encoding="utf-8")]
    assert sft[0] == {
        "prompt": training[1]["prompt"],
        "target": [{"role": "assistant", "content": "hm </think>\n\\boxed{1}"}],
    }
    assert items("data/openrlhf_sft/train.jsonl")[1].response == "hm </think>\n\\boxed{2}"


def test_a_teachers_probabilities_stay_with_its_words_and_go_with_other_words(run, tmp_path):
    kept, changed = (luffy_row(n, text) for n, text in ((1, "<think>\nhm </think>\n\\boxed{1}"), (2, "it is 2")))
    training = [{**row, "target_ds_qwen_7b_probs": [0.5, 0.25]} for row in (kept, changed)]
    source = write(tmp_path / "a.jsonl", training)
    other = write(tmp_path / "b.jsonl", [luffy_row(9, None)])
    assert run("data", "prepare", "luffy", source, "--complement", other, "--to", "data")[0] == 0
    first, second = pyarrow.parquet.read_table("data/openr1.parquet").to_pylist()
    assert first == training[0]
    assert second["target_ds_qwen_7b_probs"] is None and second["target"] != changed["target"]


@pytest.mark.realdata
def test_luffy_files_from_any_traces(run):
    source = shared("data", "traces", "long_traces.jsonl.gz")
    assert run("data", "prepare", "luffy", source, "--to", "data", "--hold-out", "0.25")[0] == 0
    training, held = items("data/openr1.parquet"), items("data/openr1.complement.parquet")
    assert len(training) + len(held) == 400 and 90 <= len(held) <= 110
    assert not {item.problem.question for item in training} & {item.problem.question for item in held}
    for item in training:
        assert isinstance(item, Demonstration) and item.response.startswith("<think>\n")
        assert item.response.count("</think>") == 1 and item.response.endswith(f"\\boxed{{{item.problem.gold}}}")
        assert item.problem.system
    assert load_problems(DataOptions(source="data/openr1.parquet"), seed=0)[0].traces


@pytest.mark.filterwarnings("ignore:the tokenizer has no tokens")
def test_show_as_written_and_as_the_model_sees_it(run, tmp_path):
    code, out, _ = run("data", "show", "arithmetic", "-n", "2")
    first = generate(ArithmeticOptions(), "train", count=1)[0]
    assert code == 0 and out.count("--- row") == 2
    assert f"user: {first.problem.question}\nreasoning: {first.reasoning}\nanswer: {first.answer}\n" in out
    code, out, _ = run("data", "show", "arithmetic", "-n", "1", "--format", "{name: r1_zero, system: ''}")
    assert f"[[{first.reasoning} </think> <answer> {first.answer} </answer> <eos>]]" in out
    prompt = out.splitlines()[1].partition("[[")[0]
    assert first.problem.question in prompt and prompt.endswith("<think>")
    assert "tokens of prompt" in out
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "how many ?", "chosen": "4", "rejected": "5"}])
    code, out, _ = run("data", "show", pairs, "--format", "question_only")
    assert "[[4 <eos>]]\n" in out and "[[5 <eos>]]\n" in out and "2 chosen" in out and "2 rejected" in out
    code, out, _ = run("data", "show", pairs)
    assert "chosen: 4\nrejected: 5" in out
    label = write(tmp_path / "label.jsonl", [LABEL])
    assert "unwanted" not in run("data", "show", label, "--format", "question_only")[1]
    assert "wanted: True" in run("data", "show", label)[1]
    choice = write(tmp_path / "choice.jsonl", [CHOICE])
    assert "choice A: 3\nchoice B: 4" in run("data", "show", choice)[1]


def test_rows_in_a_format_have_their_options_and_the_letter_of_those(run, tmp_path, monkeypatch):
    monkeypatch.setattr("lemma.models.load_model.load_tokenizer", lambda model: make_tokenizer())
    rows = [{**CHOICE, "question": f"{n}+2?", "id": str(n)} for n in range(12)]
    source = write(tmp_path / "a.jsonl", rows)
    out = run("data", "show", source, "--format", "question_only", "-n", 12)[1].split("--- row")[1:]
    golds = [said.split("gold ")[1][0] for said in out]
    assert all(f"\n{gold}) 4\n" in said for gold, said in zip(golds, out, strict=True)) and set(golds) == {"A", "B"}
    more = {"dataset": "d", "solution": "B of course"}
    solved = write(tmp_path / "b.jsonl", [{**row, **more, "problem": row["question"]} for row in rows])
    assert run("data", "prepare", "luffy", solved, "--to", "luffy")[0] == 0
    prompts = [one.problem.question for one in items("luffy/openr1.parquet")]
    assert all("\n\nA) 3\nB) 4\n\n" in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "missing.jsonl"], "the file or folder 'missing.jsonl' does not exist; in "),
        (["show", "arithmetic", "--split", "tset"], "arithmetic has no split 'tset'; did you mean 'test'?"),
        (["show", "arithmetic", "--set", "arithmetic.operation=3"], "unknown key 'arithmetic.operation'"),
        (["show", "arithmetic", "--set", "arithmetic.operations=99"], "arithmetic.operations"),
        (["show", "arithmetic", "-n", "0"], "-n 0 shows nothing; write a number from 1"),
        (["show", "arithmetic", "--format", "r1_zeros"], "there is no format 'r1_zeros'; did you mean 'r1_zero'?"),
        (["show", "rows.jsonl", "--reader", "gsm8"], "there is no reader 'gsm8'; did you mean 'gsm8k'?"),
        (["show", "rows.jsonl", "--reader", "gsm8k"], "rows.jsonl:1: the column 'answer' has no final"),
        (["prepare", "rows", "rows.jsonl", "--to", "a.xlsx"], "a.xlsx: this kind of file cannot be written; end"),
        (["prepare", "rows", "choice.jsonl", "--to", "a.csv"], "a.csv: row 1: a cell cannot hold the list in 'ch"),
        (["prepare", "rows", "rows.jsonl"], "the following arguments are required: --to"),
        (["prepare", "correct", "rows.jsonl", "--to", "a.jsonl"], "rows.jsonl:1: this row lacks a solution to imitate"),
        (["prepare", "luffy", "rows.jsonl", "--hold-out", "2"], "--hold-out 2.0 is not a share; write a number"),
        (["prepare", "luffy", "rows.jsonl"], "no training row has a teacher's response; choose a source"),
        (["prepare", "luffy", "chat.jsonl"], "has no answer; LUFFY's files need one in every row"),
        (["shwo", "arithmetic"], "does not know 'shwo'; did you mean 'show'?"),
    ],
)  # fmt: skip
def test_wrong_commands_get_one_sentence_and_write_nothing(run, tmp_path, arguments, sentence):
    write(tmp_path / "rows.jsonl", [{"question": f"{n}?", "answer": "4"} for n in range(4)])
    write(tmp_path / "choice.jsonl", [CHOICE])
    write(tmp_path / "chat.jsonl", [{"messages": CHAT}] * 2)
    before = {path.name for path in tmp_path.rglob("*")}
    code, out, err = run("data", *arguments)
    assert code == 2 and out == "" and sentence in err and err.startswith("lemma: error: ") and err.count("\n") == 1
    assert {path.name for path in tmp_path.rglob("*")} == before


def test_a_hub_dataset_by_name_through_a_mirror(tmp_path):
    rows = [{"question": f"{n}+1?", "answer": f"easy\n#### {n + 1}"} for n in range(3)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    card = (
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
        "- config_name: socratic\n  data_files:\n  - split: train\n    path: socratic/train-*\n---\n"
    )
    parquet = (tmp_path / "train.parquet").read_bytes()
    files = {"README.md": card.encode(), "main/train-00000-of-00001.parquet": parquet}
    with serve(Hub({"datasets/openai/gsm8k": files})) as hub:
        done = lemma(tmp_path, hub.url, "data", "show", "gsm8k", "-n", "1")
        assert done.returncode == 0, done.stderr
        assert "user: 0+1?\nreasoning: easy\nanswer: 1\n" in done.stdout
        assert any("train-00000-of-00001.parquet" in path for path, _ in hub.files_sent())
        missing = lemma(tmp_path, hub.url, "data", "show", "openai/gsm8")
        assert missing.returncode == 2
        assert "there is no file and no public hub dataset 'openai/gsm8'" in missing.stderr
        split = lemma(tmp_path, hub.url, "data", "show", "gsm8k", "--split", "tset")
        assert split.returncode == 2 and "tset" in split.stderr.strip().splitlines()[-1]
    again = lemma(tmp_path, "http://127.0.0.1:9", "data", "show", "gsm8k", "-n", "1", HF_HUB_OFFLINE="1")
    assert again.returncode == 0 and "user: 0+1?" in again.stdout, "what was fetched once is there offline"


@pytest.mark.parametrize("place", ["recipe", "options"])
def test_show_of_a_mix_has_rows_of_each_source_with_their_shares(run, tmp_path, place):
    first = write(tmp_path / "first.jsonl", [{"question": f"a{n}?", "answer": "1"} for n in range(8)])
    second = write(tmp_path / "second.jsonl", [{"question": f"b{n}?", "answer": "2"} for n in range(8)])
    mix = [{"source": first, "count": 3}, {"source": second, "fraction": 1.125}, {"source": first, "count": 0}]
    given = ["--set", f"mix={json.dumps(mix)}"]
    if place == "recipe":
        (tmp_path / "recipe.yaml").write_text(json.dumps({"stages": {"rl": {"kind": "rl", "data": {"mix": mix}}}}))
        given = ["recipe.yaml"]
    code, said, error = run("data", "show", *given, "-n", "2")
    assert (code, error) == (0, "")
    heads = [line for line in said.splitlines() if line.startswith(("--- source", "==="))]
    assert heads == ["=== stage rl"] * (place == "recipe") + [
        f"--- source 1 of 3: {first}, 3 of 12 rows (25.0%)",
        f"--- source 2 of 3: {second}, 9 of 12 rows (75.0%)",
        f"--- source 3 of 3: {first}, 0 of 12 rows (0.0%)",
    ]
    asked = [line[6:8] for line in said.splitlines() if line.startswith("user: ")]
    assert [one[0] for one in asked] == ["a", "a", "b", "b"] and len(set(asked)) == 4


def test_show_without_a_source_wants_a_mix(run):
    code, said, error = run("data", "show")
    assert (code, said) == (2, "") and "name a source or a recipe, or give --set mix=[...]" in error


def test_show_needs_no_torch_without_a_format():
    code = (
        "import sys; from lemma.cli import main; main(['data', 'show', 'arithmetic']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_show_reads_no_more_rows_than_it_prints(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "2+2?", "answer": "4"}) + "\nthis line is not JSON\n")
    code, out, _ = run("data", "show", str(path), "-n", "1")
    assert code == 0 and "2+2?" in out
