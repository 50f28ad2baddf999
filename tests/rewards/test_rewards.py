"""Rewards as a recipe uses them: defaults, weights, unknown verdicts, crashes, a reward model, your own function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lemma.config.options import meaning_of
from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.formats import make_format
from lemma.grading import GradingService
from lemma.grading.pool import WorkerPool
from lemma.rewards import REWARDS, RewardFailed, RewardInput, combine, distributions, make_reward

XML = "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>"
WORK = "thought<end_working_out><SOLUTION>{}</SOLUTION>"


def item(completion: str, gold: str | None = "5", **more: Any) -> RewardInput:
    golds = () if gold is None else (gold,)
    return RewardInput(completion, Problem((Message("user", "2+3?"),), golds), **more)


def value(spec: Any, completion: str, gold: str | None = "5", **more: Any) -> float | None:
    return make_reward(spec).score(item(completion, gold, **more))


def test_every_reward_is_registered_under_its_own_name() -> None:
    for name, reward in REWARDS.items():
        assert reward.model_fields["name"].default == name
        assert all(meaning_of(reward, field) for field in reward.model_fields), name


def test_xml_total_is_four_points_for_a_perfect_answer() -> None:
    names = ["correctness", "integer", "strict_format", "soft_format", "tag_count"]
    perfect = XML.format("2+3=5", "5") + "\n"
    assert sum(value(name, perfect) or 0 for name in names) == 4.0


def test_tag_count_forgives_a_missing_final_newline_and_counts_only_text_after_the_end() -> None:
    long = XML.format("word " * 100, "5")
    assert value("tag_count", long) == 0.5
    assert value({"name": "tag_count", "compat": True}, long) == pytest.approx(0.501 - 0.001 * len(long))
    assert value("tag_count", long + "\n" + "x" * 10) == pytest.approx(0.48)
    assert value("tag_count", long + "x" * 10) == pytest.approx(0.5 - 0.001 * 10 - 0.001 * 9)


def test_correctness_is_by_the_grader_and_by_strings_where_compat() -> None:
    text = XML.format("so", "5.0")
    assert value("correctness", text) == 2.0
    assert value({"name": "correctness", "compat": True}, text) == 0.0


@pytest.mark.parametrize(
    ("text", "wanted", "compat"),
    [
        (XML.format("so", "72"), 0.5, 0.5),
        (XML.format("so", "-72"), 0.0, 0.0),
        ("72", 0.0, 0.5),
        ("<answer>72", 0.0, 0.5),
        ("72</answer>", 0.0, 0.5),
        ("<answer>a</answer><answer>72</answer>", 0.5, 0.5),
        ("", 0.0, 0.0),
    ],
)
def test_digits_are_an_answer_between_its_tags(text: str, wanted: float, compat: float) -> None:
    assert value("integer", text) == wanted and value({"name": "integer", "compat": True}, text) == compat


def test_lengths_and_repetitions_are_of_all_turns() -> None:
    """Six tokens in two turns, whose 2-grams are 12, 21, 12 and 12."""
    turns: dict[str, Any] = {"earlier": [[1, 2, 1, 2]], "ids": [1, 2]}
    assert value({"name": "length", "target": 6}, "", **turns) == 1.0
    assert value({"name": "length", "target": 2, "scale": 8}, "", **turns) == 0.5
    assert value({"name": "soft_overlong", "max_tokens": 8, "margin": 4}, "", **turns) == -0.5
    assert value({"name": "repetition", "ngram": 2}, "", **turns) == -0.5
    assert value({"name": "repetition", "ngram": 5}, "", **turns) == 0.0, "no turn is that long"


def test_working_out_ranges() -> None:
    """Exact +3; approximate -3 to +1.5; answer -2 to +5; numbers -1.5 to +3; total -6.5 to +12.5."""
    names = ["exact_format", "approximate_format", "answer", "numbers"]
    best, worst = WORK.format("5"), ""
    assert [value(name, best) for name in names] == [3.0, 1.5, 5.0, 3.0]
    assert [value(name, worst) for name in names] == [0.0, -3.0, -2.0, -1.5]
    near = WORK.format("5.2")
    assert [value(name, near) for name in names] == [3.0, 1.5, 2.0, 1.5]
    wrong = WORK.format("seven")
    assert -2 < (value("answer", wrong) or 0) < 0 and value("numbers", wrong) == -1.5


@pytest.mark.parametrize(
    "text",
    ["a<end_working_out><SOLUTION>5</SOLUTION>", "<start_working_out>a<end_working_out>\n<SOLUTION>5</SOLUTION>\n"],
)
def test_exact_format_does_not_ask_for_what_the_prompt_already_said(text: str) -> None:
    assert value("exact_format", text) == 3.0
    assert value("exact_format", text + "<|endoftext|>") == 3.0
    assert value("exact_format", text + "and more") == 0.0


@pytest.mark.parametrize("longest", [1, 3, 4, 1024, 16384])
def test_a_short_response_is_never_overlong(longest: int) -> None:
    """By default the last quarter costs something: 4096 of 16384 tokens, as published."""
    reward = make_reward({"name": "soft_overlong", "max_tokens": longest})
    begins = longest - longest // 4
    assert [reward.score(item("", ids=range(n))) for n in (0, begins, longest + 1)] == [0.0, 0.0, -1.0]
    if longest >= 4:
        assert reward.score(item("", ids=range(begins + 1))) == -1 / (longest // 4)
        assert reward.score(item("", ids=range(longest))) == -1.0
    usual = make_reward("soft_overlong")
    assert [usual.score(item("", ids=range(n))) for n in (12288, 14336, 16384)] == [0.0, -0.5, -1.0]
    whole = make_reward({"name": "soft_overlong", "max_tokens": 8, "margin": 8})
    assert [whole.score(item("", ids=range(n))) for n in (0, 2, 8)] == [0.0, -0.25, -1.0]


def test_r1_zero() -> None:
    right = "so </think>\n<answer> 5 </answer>"
    assert value("r1_zero", right) == 1.0
    assert value({"name": "r1_zero", "compat": True}, right) == 0.0
    assert value("r1_zero", "so </think> <answer> 5 </answer> trailing words") == 1.0
    assert value("r1_zero", "so </think> <answer> 6 </answer>") == 0.0
    assert value({"name": "r1_zero", "format_value": 0.1}, "so </think> <answer> 6 </answer>") == 0.1
    assert value("r1_zero", "5") == 0.0


def test_think_formats() -> None:
    assert value("think_format", "<think>a\nb</think> c") == 1.0
    assert value({"name": "think_format", "opened": True}, "a</think> c") == 1.0
    assert value("think_answer_format", "<think>a\nb</think>\n<answer>5</answer>") == 1.0
    assert value({"name": "think_answer_format", "compat": True}, "<think>a\nb</think>\n<answer>5</answer>") == 0.0


def test_the_format_decides_which_answer_is_graded() -> None:
    fmt = make_format("r1_zero")
    text = "it could be 5 </think> <answer> 6 </answer>"
    assert item(text, parsed=fmt.parse(text)).verdict[:2] == ("wrong", "number")
    missing = "it is 5"
    assert item(missing, parsed=fmt.parse(missing)).verdict[:2] == ("wrong", "no_answer")
    assert item(missing).verdict.kind == "right"


@pytest.mark.parametrize("said", ["so </think> <answer> 6 </answer>", "it is 5"])
def test_a_gold_that_says_nothing_makes_nothing_wrong(said: str) -> None:
    """Neither an answer nor the lack of one: in a group of both, one would be paid less than the other."""
    parsed = make_format("r1_zero").parse(said)
    for golds in (("\\frac{",), ("\\boxed{}",), ("???", "\\boxed{}")):
        assert RewardInput(said, Problem((Message("user", "?"),), golds), parsed=parsed).verdict.kind == "unknown"


def test_any_of_several_golds_counts() -> None:
    several = RewardInput("\\boxed{x+1}", Problem((Message("user", "?"),), ("y", "1+x")))
    assert several.verdict.right


def test_sum_by_weight_with_none_left_out() -> None:
    rewards = [make_reward({"name": "accuracy", "weight": 2.0}), make_reward({"name": "length", "weight": 0.5})]
    first, second = combine(rewards, [item("\\boxed{5}"), item("\\boxed{x}", "x", ids=range(5))])
    assert first.total == pytest.approx(2.0 + 0.5 * (1 - 5 / 8192)) and first.parts["accuracy"] == 1.0
    assert second.parts == {"accuracy": 1.0, "length": None} and second.total == 2.0


def test_an_unknown_verdict_is_never_a_reward() -> None:
    rewards = [make_reward("accuracy"), make_reward("think_format")]
    rows = combine(rewards, [item("<think>a</think>5", None), item("<think>a</think>5", "9^{9^{9}}")])
    assert [row.total for row in rows] == [None, None]
    assert [row.parts["accuracy"] for row in rows] == [None, None]
    assert [row.parts["think_format"] for row in rows] == [1.0, 1.0]


def no_worker(pool: WorkerPool, place: int, tries: int = 1) -> Any:
    raise OSError("no more processes")


@pytest.mark.parametrize("spec", [{"name": "graded", "grader": "r1_zero_fast"}, {"name": "r1_zero", "compat": True}])
def test_another_systems_grader_that_cannot_tell_leaves_the_completion_out(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where our own grader could: nothing else may then be learnt from this completion."""
    rewards = [make_reward(spec), make_reward("think_format")]
    text = "<think>a</think> <answer>5</answer>"
    rows = combine(rewards, [item(text, None), item(text)])
    with GradingService() as silent:
        monkeypatch.setattr(WorkerPool, "_worker", no_worker)
        rows += combine(rewards, [item(text, service=silent)])
    assert [list(row.parts.values()) for row in rows] == [[None, 1.0], [1.0, 1.0], [None, 1.0]]
    assert [row.total for row in rows] == [None, 2.0, None]


def test_distributions_are_logged_by_name() -> None:
    rewards = [make_reward("accuracy"), make_reward("integer"), make_reward({"name": "integer", "value": 1.0})]
    numbers = distributions(combine(rewards, [item("\\boxed{5}"), item("\\boxed{6}"), item("\\boxed{5}", None)]))
    assert numbers["rewards/accuracy/mean"] == 0.5 and numbers["rewards/accuracy/std"] == 0.5
    assert numbers["rewards/accuracy/absent"] == pytest.approx(1 / 3)
    assert (numbers["rewards/accuracy/min"], numbers["rewards/accuracy/max"]) == (0.0, 1.0)
    assert "rewards/integer_2/mean" in numbers and numbers["reward/mean"] == 0.5


def _write(tmp_path: Path, code: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(code, encoding="utf-8")
    return str(path)


def test_your_own_reward(tmp_path: Path) -> None:
    path = _write(tmp_path, "def short(item, limit=10):\n    return 1 if len(item.completion) < limit else None\n")
    assert value(f"{path}:short", "brief") == 1.0
    assert value({"name": "custom", "function": f"{path}:short", "options": {"limit": 3}}, "brief") is None
    row = combine([make_reward(f"{path}:short")], [item("brief")])[0]
    assert row.parts == {"short": 1.0}


@pytest.mark.parametrize("body", ["len(given)", "given.strip()", "'a' in given"])
def test_a_function_that_takes_its_input_for_text_is_told(tmp_path: Path, body: str) -> None:
    path = _write(tmp_path, f"def texts(given):\n    return {body}\n")
    with pytest.raises(RewardFailed, match=r"gets a RewardInput: read the text from its `completion`$"):
        combine([make_reward(f"{path}:texts")], [item("brief")])


def test_a_reward_is_not_called_without_completions(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "from lemma.rewards import Reward\n\n\nclass Longest(Reward):\n    def score_all(self, items):\n"
        "        longest = max(len(one.completion) for one in items)\n"
        "        return [len(one.completion) / longest for one in items]\n",
    )
    longest = make_reward(f"{path}:Longest")
    assert combine([longest], []) == []
    assert [row.total for row in combine([longest], [item("ab"), item("abcd")])] == [0.5, 1.0]


def test_a_crash_stops_with_the_name_and_the_completion(tmp_path: Path) -> None:
    path = _write(tmp_path, "def broken(item):\n    return 1 / (len(item.completion) - 4)\n")
    with pytest.raises(RewardFailed) as caught:
        combine([make_reward(f"{path}:broken")], [item("fine!"), item("four")])
    message = str(caught.value)
    assert "reward 'broken' failed with ZeroDivisionError" in message and "'four'" in message
    assert f"{path}:2:" in message and caught.value.completion == "four"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("SystemExit(0)", "SystemExit: 0"),
        ("GeneratorExit", "GeneratorExit"),
        ("Mute", r"Mute: \(and ValueError when it was asked why\)"),
    ],
)
def test_a_reward_cannot_end_the_program(tmp_path: Path, raised: str, said: str) -> None:
    mute = "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\n\n\n"
    path = _write(tmp_path, f"{mute}def leaving(item):\n    raise {raised}\n")
    with pytest.raises(RewardFailed, match=f"reward 'leaving' failed with {said}"):
        combine([make_reward(f"{path}:leaving")], [item("x")])


@pytest.mark.parametrize("returned", ["'1'", "float('nan')", "float('inf')", "[1]", "__import__('numpy').ones(2)"])
def test_a_reward_that_is_no_number_is_a_crash(tmp_path: Path, returned: str) -> None:
    path = _write(tmp_path, f"def odd(item):\n    return {returned}\n")
    with pytest.raises(RewardFailed, match="which is not a finite number") as caught:
        combine([make_reward(f"{path}:odd")], [item("x")])
    assert str(caught.value).startswith(f"{path}:1: reward 'odd' returned"), "the place of the function, not Lemma's"
    assert str(caught.value).endswith("on the completion 'x'; return a number, or None for no reward")


@pytest.mark.parametrize(
    ("returned", "meant"), [("np.float32(0.5)", 0.5), ("np.bool_(True)", 1.0), ("True", 1.0), ("np.ones(1)", 1.0)]
)
def test_what_is_meant_as_a_number_is_one(tmp_path: Path, returned: str, meant: float) -> None:
    path = _write(tmp_path, f"import numpy as np\n\ndef mine(item):\n    return {returned}\n")
    assert combine([make_reward(f"{path}:mine")], [item("x")])[0].total == meant


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\nimport no_such_module_at_all\n", "mine.py:2: this file cannot be imported: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "mine.py:1: this file cannot be imported: SystemExit"),
        ("def mine(item, needed):\n    return 1.0\n", "mine.py:1: reward 'mine' cannot be called .* 'needed'"),
        ("def mine():\n    return 1.0\n", "mine.py:1: reward 'mine' cannot be called"),
    ],
)
def test_a_file_that_cannot_score_is_told_before_anything_is_loaded(tmp_path: Path, text: str, sentence: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(UserError, match=sentence):
        make_reward(f"{path}:mine").check()


def test_a_function_for_trl_is_known_by_what_it_takes(tmp_path: Path) -> None:
    path = _write(tmp_path, "def mine(completions, **columns):\n    return [len(one) for one in completions]\n")
    reward = make_reward({"name": f"{path}:mine", "weight": 0.5})
    assert (reward.name, reward.label, reward.weight) == ("trl", "mine", 0.5)
    assert combine([reward], [item("four")])[0].parts == {"mine": 4.0}
    with pytest.raises(UserError, match=r"like functions written for TRL; write `trl: .*mine.py:mine`"):
        make_reward({"name": "custom", "function": f"{path}:mine"}).check()


@pytest.mark.parametrize("gold", [None, "x" * 100_000], ids=["none", "too long"])
def test_a_function_that_looks_at_an_unknown_verdict_gives_no_reward(tmp_path: Path, gold: str | None) -> None:
    """An error never becomes a reward; a function that does not ask for the verdict is not concerned."""
    path = _write(
        tmp_path, "def right(item):\n    return float(item.verdict.right)\n\ndef other(item):\n    return 0.25\n"
    )
    right, other = make_reward(f"{path}:right"), make_reward(f"{path}:other")
    assert combine([right], [item("5", gold)])[0].total is None
    assert combine([other, right], [item("5", gold)])[0].total is None
    assert combine([other], [item("5", gold)])[0].total == 0.25
    assert combine([other, right], [item("5", "5")])[0].total == 1.25


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("acuracy", "there is no reward 'acuracy'; did you mean 'accuracy'?"),
        ({"name": "length", "targett": 3}, "reward length has no option 'targett'; did you mean 'target'?"),
        ({"name": "graded", "grader": "luffy_v9"}, "there is no grader 'luffy_v9'"),
        ({"name": "custom", "function": "mine"}, "write `path/to/file.py:function`"),
        ({"name": "soft_overlong", "max_tokens": 0}, "option 'max_tokens' of reward soft_overlong"),
        (
            {"name": "soft_overlong", "max_tokens": 8, "margin": 9},
            "option 'margin' of reward soft_overlong: a margin of 9",
        ),
        ({"name": "soft_overlong", "margin": 16385}, "write a margin of at most 16384, or leave it out"),
    ],
)
def test_wrong_specifications_get_one_sentence(spec: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        make_reward(spec)
    assert sentence in str(caught.value)


def test_missing_functions_get_one_sentence(tmp_path: Path) -> None:
    path = _write(tmp_path, "def brief(item):\n    return 1\n")
    with pytest.raises(UserError, match="did you mean 'brief'"):
        combine([make_reward(f"{path}:breif")], [item("x")])
    with pytest.raises(UserError, match="there is no file"):
        combine([make_reward("nowhere.py:f")], [item("x")])


def test_a_grader_of_another_system_as_a_reward() -> None:
    assert value({"name": "graded", "grader": "luffy_v1"}, "a</think>\\boxed{6}") == -0.5
    assert value({"name": "graded", "grader": "r1_zero_fast"}, "a</think> <answer>5</answer>") == 1.0
    assert value({"name": "graded", "grader": "boxed_fast"}, "\\boxed{5}") == 1.0
    assert value({"name": "graded", "grader": "verifier_gsm8k"}, "it is 5", None) is None


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny sequence-classification model with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    words = ["<pad>", "<unk>", "2+3?", *map(str, range(30))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("reward_model")
    LlamaForSequenceClassification(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


def test_a_reward_model_scores_in_batches(reward_model: str) -> None:
    items = [item(" ".join(map(str, range(n, n + 1 + n % 4)))) for n in range(9)]
    small, large = (make_reward({"name": "reward_model", "path": reward_model, "batch": b}) for b in (2, 16))
    scores = [row.parts["reward_model"] for row in combine([large], items)]
    assert [row.parts["reward_model"] for row in combine([small], items)] == pytest.approx(scores, abs=1e-5)
    assert len(set(scores)) > 5
    one = combine([large], items[3:4])[0].parts["reward_model"]
    assert one == pytest.approx(scores[3], abs=1e-5)


def test_a_missing_reward_model_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        combine([make_reward({"name": "reward_model", "path": str(tmp_path)})], [item("x")])
