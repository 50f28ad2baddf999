from __future__ import annotations

import re

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, Judged, Message, Preference, Problem, problem_of
from lemma.data import readers
from lemma.data.readers import READERS, choose
from lemma.data.rows import Row, boxed


def read(rows, name, say=pytest.fail):
    return list(readers.read_each(rows, name, say))


def one(values, name="auto"):
    return read([Row(values, "rows.jsonl", 1, 1)], name)[0][1]


def user(text):
    return (Message("user", text),)


ASSISTANT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]

ROWS = {
    "lemma": {"id": "a/1", "dataset": "a", "problem": "2+2?", "answer": "4", "solution": None},
    "luffy": {
        "data_source": "openr1",
        "prompt": [{"role": "system", "content": "think"}, {"role": "user", "content": "2+2?"}],
        "target": [{"role": "assistant", "content": "<think>\neasy </think>\n\\boxed{4}"}],
        "ability": "math",
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra_info": {"index": 7, "split": "default"},
    },
    "rlvr": {"messages": [{"role": "user", "content": "2+2?"}], "ground_truth": "4", "dataset": "GSM8K"},
    "preference": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "judged": {"prompt": "2+2?", "completion": "4", "label": True},
    "multiple_choice": {"question": "2+2?", "choices": ["3", "4"], "answer": 1},
    "hellaswag": {
        "ind": 3,
        "activity_label": "Baking",
        "ctx_a": "A cook [header] takes flour.",
        "ctx_b": "then he",
        "ctx": "A cook takes flour. then he",
        "endings": ["sleeps.", "adds [substeps] eggs."],
        "label": "1",
    },
    "gpqa": {"Question": "2+2?", "Correct Answer": "4", **{f"Incorrect Answer {n}": str(4 + n) for n in (1, 2, 3)}},
    "olympiadbench": {"id": 7, "question": "2+2?", "context": None, "final_answer": ["$4$"], "error": "1e-1"},
    "trace": {"problem": "2+2?", "generated_solution": "<think>two twos</think>", "expected_answer": "4"},
    "prompt_response": {"prompt": "User: 2+2?\nAssistant: <think>", "response": " 4 </think>", "ground_truth": "4"},
    "prompt_completion": {"prompt": "2+2?", "completion": "4"},
    "luffy_sft": {"prompt": ASSISTANT[:1], "target": ASSISTANT[1:]},
    "instruction": {"instruction": "Add", "input": "2 and 2", "output": "4"},
    "math": {"problem": "2+2?", "solution": r"It is $\boxed{4}$.", "level": "Level 3", "type": "Algebra"},
    "gsm8k": {"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### $1,004"},
    "question_answer": {"question": "2+2?", "answer": 4},
    "prompt_answer": {"prompt": "2+2?", "solution": "4"},
    "chat": {"messages": ASSISTANT},
    "prompt": {"prompt": ASSISTANT[:1]},
    "text": {"text": "Two and two are four."},
}


def test_auto_knows_every_format():
    assert set(ROWS) == set(READERS)
    for name, values in ROWS.items():
        row = Row(values, "rows.jsonl", 1, 1)
        assert choose("auto", row) is READERS[name] is choose(name, row), name
        assert one(values) == one(values, name)
        assert problem_of(one(values)).question


@pytest.mark.parametrize(
    ("reader", "more"),
    [
        ("luffy", {"target_ds_qwen_7b_probs": [0.5, 1]}),
        ("luffy", {"trace_probs": [0.5, 1.0004], "target_ds_qwen_7b_probs": [0.1]}),
        ("lemma", {"target": "4", "trace_probs": [0.5, 1]}),
        ("lemma", {"target": "4", "extra": '{"trace_probs": [0.5, 1]}'}),
    ],
)
def test_a_teachers_probabilities_are_kept(reader, more):
    assert problem_of(one({**ROWS[reader], **more}, reader)).extra["trace_probs"] == [0.5, 1.0]
    assert "trace_probs" not in problem_of(one({**ROWS[reader], **dict.fromkeys(more)}, reader)).extra


def test_gsm8k():
    item = one(ROWS["gsm8k"])
    assert item.problem == Problem(user("2+2?"), ("1004",))
    assert (item.reasoning, item.answer) == ("2+2=<<2+2=4>>4", "1004")


def test_a_row_of_gsm8k_among_bare_answers_keeps_its_answer_apart():
    rows = [Row(values, "a.jsonl", 1, 1) for values in (ROWS["question_answer"], ROWS["gsm8k"])]
    bare, worked = (item for _, item in read(rows, "auto"))
    assert bare.golds == ("4",) and worked == one(ROWS["gsm8k"])


def test_math_levels_subjects_and_boxes():
    item = one(ROWS["math"])
    assert (item.problem.gold, item.problem.level, item.problem.subject) == ("4", "3", "Algebra")
    assert item.answer == "4" and item.reasoning.startswith("It is")
    bare = one({"problem": "p", "level": 5, "subject": "Geometry", "unique_id": "test/g/1.json", "answer": "7"})
    assert isinstance(bare, Problem)
    assert (bare.id, bare.level, bare.golds) == ("test/g/1.json", "5", ("7",))
    proof = one({"problem": "p", "solution": "Trivial."})
    assert proof.response == "Trivial." and proof.problem.golds == ()


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"so $\boxed 2$.", "2"),
        (r"\boxed{1}, no: $\boxed \frac12$", r"\frac12"),
        ("it is \\boxed 7.\nDone", "7"),
        (r"\boxed {5}", "5"),
        (r"\boxed", None),
        (r"\boxed{ }", None),
        (r"\boxed{1", None),
        ("no box", None),
    ],
)
def test_boxed_takes_the_last_balanced_box(solution, answer):
    assert boxed(solution) == answer


def test_prompt_and_response_may_be_text_or_messages():
    plain = one({"prompt": "2+2?", "response": "4", "ground_truth": 4})
    assert plain == Demonstration(Problem(user("2+2?"), ("4",)), response="4")
    assert one({"prompt": ASSISTANT[:1], "response": "4"}).problem.messages == user("2+2?")
    asked = one(ROWS["instruction"])
    assert asked.prompt is None and asked.problem.question == "Add\n\n2 and 2" and asked.response == "4"


def test_trace_keeps_reasoning_and_answer_apart():
    item = one(ROWS["trace"])
    assert (item.reasoning, item.answer, item.problem.golds) == ("<think>two twos</think>", "4", ("4",))


@pytest.mark.parametrize("column", ["answer", "solution", "ground_truth"])
def test_prompt_answer_takes_either_column_and_either_prompt(column):
    assert one({"prompt": "2+2?", column: "4"}) == one({"prompt": ASSISTANT[:1], column: 4})


def test_luffy_with_and_without_a_target():
    item = one(ROWS["luffy"])
    assert isinstance(item, Demonstration)
    assert item.response == item.problem.traces[0] == "<think>\neasy </think>\n\\boxed{4}"
    assert (item.problem.source, item.problem.system, item.problem.golds) == ("openr1", "think", ("4",))
    assert item.problem.extra == {"ability": "math", "extra_info": {"index": 7, "split": "default"}}
    bare = one({**ROWS["luffy"], "target": None})
    assert isinstance(bare, Problem) and bare.traces == () and bare.id == item.problem.id


def test_rlvr_names_its_verifier_and_takes_several_golds():
    assert one(ROWS["rlvr"]).source == "gsm8k"
    item = one({"messages": ASSISTANT, "ground_truth": ["4", "four"], "dataset": "math"})
    assert item.golds == ("4", "four") and item.messages == user("2+2?")


def test_chat_takes_the_last_assistant_message():
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes?"}, {"from": "human", "value": "2+2?"}]
    item = one({"conversations": [*turns, {"from": "gpt", "value": "4"}]})
    assert item.response == "4"
    assert [message.role for message in item.problem.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "values",
    [
        {"choices": ["3", "4"], "answer": "B"},
        {"choices": {"text": ["3", "4"], "label": ["1", "2"]}, "answerKey": "2"},
        {"options": ["3", "4"], "answer_index": 1},
        {"A": "3", "B": "4", "answer": "B"},
        {"choices": ["3", "4"], "labels": ["x", "y"], "answer": "y"},
        {"choices": {"text": ["3", "4"], "label": ["1", "2"]}, "answerKey": 2},
        {"choices": {"text": ["3", "4"], "label": ["0", "1"]}, "answerKey": 1.0},
    ],
)
def test_multiple_choice_gold_is_a_letter(values):
    item = one({"question": "2+2?", **values})
    assert item.choices == ("3", "4") and item.golds == ("B",)


def test_hellaswag_is_a_beginning_with_endings():
    item = one(ROWS["hellaswag"])
    assert item.question == "Baking: A cook takes flour. Then he"
    assert item.choices == ("sleeps.", "adds eggs.") and item.golds == ("B",)


def test_subject_and_level_of_question_and_answer():
    item = one({**ROWS["question_answer"], "subject": "sums", "level": "Level 2"})
    assert (item.subject, item.level) == ("sums", "2")


def test_gpqa_moves_the_right_answer_about():
    letters = set()
    for number in range(12):
        item = one({**ROWS["gpqa"], "Question": f"question {number}"})
        assert item.choices["ABCD".index(item.gold)] == "4" and set(item.choices) == {"4", "5", "6", "7"}
        letters.add(item.gold)
    assert len(letters) > 1 and one(ROWS["gpqa"]) == one(ROWS["gpqa"])


def test_lemma_schema_keeps_everything():
    item = one(
        {
            **ROWS["lemma"],
            "level": 3,
            "subject": "s",
            "solution": "2+2\n#### 4",
            "target": "trace",
            "original": {"unit": "cm"},
        }
    )
    assert (item.reasoning, item.answer, item.problem.traces) == ("2+2", "4", ("trace",))
    assert (item.problem.level, item.problem.source, item.problem.extra["original"]) == ("3", "a", {"unit": "cm"})
    for target, traces in ((["a", "b"], ("a", "b")), (ASSISTANT, ("4",)), (ASSISTANT[1:], ("4",))):
        assert problem_of(one({**ROWS["lemma"], "target": target})).traces == traces
    verbatim = one({**ROWS["lemma"], "prompt": "P", "response": "R", "generated_solution": "G"})
    assert (verbatim.prompt, verbatim.response, verbatim.reasoning) == ("P", "R", None)
    choice = one({**ROWS["lemma"], "choices": ["3", "4"], "labels": ["A", "B"], "answer": "B"})
    assert choice.choices == ("3", "4") and choice.golds == ("B",)


@pytest.mark.parametrize(
    ("solution", "reasoning"),
    [
        ("2+2\n#### 4", "2+2"),
        ("2+2\n#### 4\n", "2+2"),
        ("2+2\n####4.0", "2+2"),
        ("a\n#### Step 1\nb\n#### Step 2\nc", "a\n#### Step 1\nb\n#### Step 2\nc"),
        ("a\n#### Step 1\nb\n#### 4", "a\n#### Step 1\nb"),
        ("a\n#### 4\nso it is", "a\n#### 4\nso it is"),
        ("a\n#### 5", "a\n#### 5"),
        ("a\n#### The end", "a\n#### The end"),
        ("#### 4", "#### 4"),
        ("#### Step 1\na", "#### Step 1\na"),
    ],
)
def test_only_a_last_line_that_repeats_the_answer_is_taken_off_the_working(solution, reasoning):
    for column in ("solution", "generated_solution"):
        assert one({**ROWS["lemma"], column: solution}).reasoning == reasoning
    assert one({**ROWS["lemma"], "reasoning": solution}).reasoning == solution.strip()


def test_working_that_is_empty_but_for_the_answer_is_none():
    assert isinstance(one({**ROWS["lemma"], "solution": "\n#### 4"}), Problem)
    assert isinstance(one({**ROWS["lemma"], "solution": " "}), Problem)
    thousand = one({**ROWS["lemma"], "answer": "1,004", "solution": "w\n#### 1004"})
    assert (thousand.reasoning, thousand.answer) == ("w", "1,004")
    stated = one({**ROWS["lemma"], "generated_solution": "w\n#### 5", "expected_answer": "5"})
    assert (stated.reasoning, stated.answer) == ("w", "5")


CONVERSATION = "\n\nHuman: Hello\n\nAssistant: Hi\n\nHuman: 2+2?\n\nAssistant:"


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "2+2?", "chosen": "It is 4", "rejected": "It is 5"},
        {"prompt": ASSISTANT[:1], "chosen": "It is 4", "rejected": "It is 5"},
        {
            "prompt": ASSISTANT[:1],
            "chosen": [{"role": "assistant", "content": "It is 4"}],
            "rejected": [{"role": "assistant", "content": "It is 5"}],
        },
        {
            "chosen": [*ASSISTANT[:1], {"role": "assistant", "content": "It is 4"}],
            "rejected": [*ASSISTANT[:1], {"role": "assistant", "content": "It is 5"}],
        },
        {"prompt": "2+2?", "chosen": [*ASSISTANT[:1], {"role": "assistant", "content": "It is 4"}],
         "rejected": [*ASSISTANT[:1], {"role": "assistant", "content": "It is 5"}]},
    ],
)  # fmt: skip
def test_preferences_with_the_prompt_given_or_shared(values):
    assert one(values) == Preference(Problem(user("2+2?")), "It is 4", "It is 5")


SYSTEM, HELLO = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hello!"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("It is 4", "It is 5"))


@pytest.mark.parametrize(
    ("prompt", "earlier", "asked"),
    [
        ("Hi", [HELLO, *ASSISTANT[:1]], ["Hi", "Hello!", "2+2?"]),
        ([SYSTEM], ASSISTANT[:1], ["Be brief.", "2+2?"]),
        ("2+2?", [SYSTEM, *ASSISTANT[:1]], ["Be brief.", "2+2?"]),
        ("2+2? ", [*ASSISTANT[:1], HELLO, *ASSISTANT[:1]], ["2+2?", "Hello!", "2+2?"]),
    ],
)
def test_turns_between_prompt_and_response_are_kept(prompt, earlier, asked):
    pair = one({"prompt": prompt, "chosen": [*earlier, FOUR], "rejected": [*earlier, FIVE]})
    single = one({"prompt": prompt, "completion": [*earlier, FOUR], "label": True})
    assert [said.content for said in pair.problem.messages] == asked
    assert (pair.chosen, pair.rejected) == ("It is 4", "It is 5")
    assert single == Judged(pair.problem, "It is 4", True)


PARTED = [
    {"chosen": f"{CONVERSATION} 4\n\nHuman: Sure?\n\nAssistant: Yes", "rejected": f"{CONVERSATION} 5"},
    {"chosen": "\n\nHuman: a b\n\nAssistant: 4", "rejected": "\n\nHuman: a c\n\nAssistant: 5"},
    {"chosen": ASSISTANT, "rejected": [{"role": "user", "content": "x"}, ASSISTANT[1]]},
]


@pytest.mark.parametrize("values", PARTED)
def test_pairs_that_part_too_early_are_counted_and_left_out(values):
    """Known datasets hold some; a file of nothing else is refused."""
    bad = Row(values, "hh.jsonl", 2, 2)
    rows = [Row(ROWS["preference"], "hh.jsonl", 1, 1), bad, Row(ROWS["preference"], "hh.jsonl", 3, 3)]
    said = []
    found = read(rows, "preference", said.append)
    assert re.match(r"1 of 3 rows were left out, such as this one: hh.jsonl:2: .* their last", *said)
    assert [row.number for row, _ in found] == [1, 3]
    with pytest.raises(UserError, match=r"^hh.jsonl:2: 'chosen' and 'rejected' differ before their last"):
        read([bad], "preference")


def test_preferences_in_one_text():
    item = one({"chosen": f"{CONVERSATION} It is 4", "rejected": f"{CONVERSATION} It is 5"})
    assert (item.chosen, item.rejected) == ("It is 4", "It is 5")
    assert item.problem.messages == (Message("user", "Hello"), Message("assistant", "Hi"), Message("user", "2+2?"))
    plain = one({"chosen": "What is 2+2? four", "rejected": "What is 2+2? fifty"})
    assert (plain.problem.question, plain.chosen, plain.rejected) == ("What is 2+2?", "four", "fifty")


@pytest.mark.parametrize(("label", "wanted"), [(True, True), (0, False), ("True", True), (1.0, True)])
def test_judged_labels(label, wanted):
    assert one({**ROWS["judged"], "label": label}) == Judged(Problem(user("2+2?")), "4", wanted)


WRONG = [
    ({"question": "2+2?", "answer": None}, "gsm8k", "the column 'answer' is null"),
    ({"question": "2+2?", "answer": "just 4"}, "gsm8k", "no final answer after '####'"),
    ({"answer": "#### 4"}, "gsm8k", "the column 'question' is missing"),
    ({"question": 3, "answer": "#### 4"}, "gsm8k", "the column 'question' holds a number, not text"),
    ({"problem": "p", "answer": None}, "math", "neither 'answer' nor 'solution' holds an answer"),
    ({"problem": " ", "answer": "4"}, "math", "the column 'problem' is empty"),
    ({"problem": "p", "answer": True}, "math", "holds true or false, not an answer"),
    ({"prompt": [], "answer": "4"}, "prompt_answer", "the column 'prompt' holds nothing, not a list of messages"),
    ({"prompt": ["2+2?"], "answer": "4"}, "prompt_answer", "a message of the column 'prompt' is text"),
    ({"prompt": [{"role": "user"}], "answer": "4"}, "prompt_answer", "lacks 'role' or 'content'"),
    ({**ROWS["luffy"], "reward_model": "4"}, "luffy", "the column 'reward_model' holds text, not an object"),
    ({**ROWS["luffy"], "target": ASSISTANT[:1]}, "luffy", "'target' does not end with a message of the assistant"),
    ({**ROWS["luffy"], "trace_probs": [0.5, -1.2]}, "luffy", "'trace_probs' holds -1.2, which is not a probability"),
    ({**ROWS["luffy"], "target_ds_qwen_7b_probs": "0.5"}, "luffy", "'target_ds_qwen_7b_probs' holds text, not a list"),
    ({**ROWS["lemma"], "extra": '{"trace_probs": [2]}'}, "lemma", "'trace_probs' holds 2, which is not a probability"),
    ({"messages": ASSISTANT[:1]}, "chat", "does not end with a message of the assistant"),
    ({"messages": ASSISTANT[1:]}, "chat", "holds an answer and no question"),
    ({"question": "q", "choices": ["a", "b"], "answer": "C"}, "multiple_choice", "no answer among the labels A, B"),
    ({"question": "q", "choices": ["a"], "labels": ["A", "B"], "answer": "A"}, "multiple_choice", "1 choices but 2"),
    (
        {"question": "q", "choices": ["a"], "labels": 3, "answer": "A"},
        "multiple_choice",
        "'labels' holds a number, not",
    ),
    ({"question": "q", "choices": ["a"] * 27, "answer": 26}, "multiple_choice", "27 choices but only 26 letters"),
    ({"prompt": "p", "chosen": "a", "rejected": None}, "preference", "the column 'rejected' is null"),
    ({"chosen": "yes", "rejected": "no"}, "preference", "begin differently and there is no column 'prompt'"),
    ({"prompt": [SYSTEM], "chosen": [FOUR], "rejected": [FIVE]}, "preference", "the prompt has no message of the user"),
    ({"prompt": [HELLO], "completion": "4", "label": 1}, "judged", "the prompt has no message of the user"),
    ({"chosen": "a b", "rejected": ASSISTANT}, "preference", "one of 'chosen' and 'rejected' is text"),
    ({"prompt": "p", "chosen": ASSISTANT, "rejected": ASSISTANT}, "preference", "neither repeat nor continue"),
    (
        {"prompt": "p", "completion": [ASSISTANT[1], ASSISTANT[1]], "label": 1},
        "judged",
        "ends with two messages of the assistant",
    ),
    (
        {"prompt": "p", "completion": [{"role": "assistant", "content": " "}], "label": 1},
        "judged",
        "'completion' does not end with a message of the assistant",
    ),
    ({"prompt": "p", "completion": "c", "label": "maybe"}, "judged", "holds 'maybe', not true or false"),
    ({**ROWS["lemma"], "extra": "{"}, "lemma", "the column 'extra' is not JSON text"),
    ({**ROWS["lemma"], "extra": '{"a": "\\ud800"}'}, "lemma", "'extra' is not JSON text: it holds half of a surrogate"),
    ({**ROWS["lemma"], "target": ASSISTANT[:1]}, "lemma", "'target' does not end with a message of the assistant"),
    ({**ROWS["lemma"], "target": ["4", 4]}, "lemma", "a message of the column 'target' is text"),
]


@pytest.mark.parametrize(("values", "reader", "sentence"), WRONG)
def test_a_wrong_row_is_named_with_its_place_and_columns(values, reader, sentence):
    with pytest.raises(UserError) as caught:
        read([Row(ROWS[reader], "rows.jsonl", 1, 1), Row(values, "rows.jsonl", 2, 3)], reader)
    said = str(caught.value)
    assert said.startswith("rows.jsonl:3: ") and sentence in said and f"columns: {', '.join(values)}" in said


@pytest.mark.parametrize(("answer", "fix"), [(None, "fill it, or remove the row"), (True, "write it as text")])
def test_a_row_that_is_easily_repaired_says_how(answer, fix):
    with pytest.raises(UserError) as caught:
        read([Row({"question": "2+2?", "answer": answer}, "rows.jsonl", 1, 1)], "question_answer")
    assert str(caught.value).endswith(f"(columns: question, answer); {fix}")


def test_rows_without_lines_have_numbers():
    with pytest.raises(
        UserError, match=r"^a.parquet: row 5: the column 'answer' is null \(columns: question, answer\)"
    ):
        read([Row({"question": "q", "answer": None}, "a.parquet", 5)], "gsm8k")


def test_unknown_columns_and_unknown_readers():
    with pytest.raises(
        UserError, match=r"rows.jsonl:1: these columns do not say .* \(columns: foo, bar\); write which is which"
    ):
        one({"foo": 1, "bar": 2})
    with pytest.raises(UserError, match="there is no reader 'gsm8'; did you mean 'gsm8k'"):
        one({"foo": 1}, "gsm8")


def test_olympiadbench_keeps_the_tolerance_and_joins_answers():
    values = ROWS["olympiadbench"] | {"context": "Let x be 2.", "final_answer": ["$4$", "$5$"], "subfield": "Algebra"}
    problem = one(values)
    assert (problem.question, problem.golds) == ("Let x be 2.\n\n2+2?", ("$4$, $5$",))
    assert (problem.subject, problem.extra["original"]["error"]) == ("Algebra", "1e-1")
