"""Ids and masks: separate tokenisation, positions not values, EOS learnt, and the two classic batch layouts."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lemma.core.errors import LemmaWarning, UserError
from lemma.core.types import Demonstration, Message, Problem
from lemma.formats import FORMATS, make_format
from lemma.formats.encode import (
    encode_continuation,
    encode_demonstration,
    encode_document,
    encode_prompt,
    encode_text,
    encode_texts,
    pack_documents,
    tokenize_prompt_and_output,
    warn_of_unknown_words,
)
from lemma.models.tiny import tiny_tokenizer
from tests.formats.tokenizers_made_here import KINDS, all_tokenizers, make_spacing_tokenizer, make_tokenizer

PROBLEM = Problem((Message("user", "What is 2 + 2?"),), id="row-7")
WORKED = Demonstration(PROBLEM, reasoning="two and two", answer="4")
Tokenizers = dict[str, PreTrainedTokenizerFast]


IDS_OF_WORDS = {
    "Hello": 9707, ",": 11, " world": 1879, "!": 0, "This": 1986, " is": 374, " a": 264, " another": 2441,
    " test": 1273, ".": 13,
}  # fmt: skip


class WordTokenizer:
    """The ids that Qwen2.5-Math gives to the words of the reference fixture."""

    pad_token_id = eos_token_id = 151643

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        found = []
        while text:
            word = max((word for word in IDS_OF_WORDS if text.startswith(word)), key=len)
            found.append(IDS_OF_WORDS[word])
            text = text.removeprefix(word)
        return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_demonstration_is_prompt_target_and_eos(name: str, kind: str, tokenizers: Tokenizers) -> None:
    fmt, tokenizer = make_format(name), tokenizers[kind]
    prompt = encode_prompt(fmt, PROBLEM, tokenizer)
    trajectory = encode_demonstration(fmt, WORKED, tokenizer)
    count = len(prompt)
    assert trajectory.ids_T[:count].tolist() == prompt.tolist()
    assert tokenizer.decode(prompt) == fmt.prompt(PROBLEM, tokenizer)
    assert tokenizer.decode(trajectory.ids_T[count:-1]) == fmt.target(WORKED)
    assert trajectory.ids_T[-1] == tokenizer.eos_token_id
    assert trajectory.loss_mask_T.tolist() == [False] * count + [True] * (len(trajectory) - count)
    assert (trajectory.origin, trajectory.finish, trajectory.problem_id) == ("teacher", "given", "row-7")


@pytest.mark.parametrize("kind", KINDS)
def test_many_texts_have_the_ids_of_each_one(kind: str, tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers[kind]
    texts = [make_format(name).prompt(PROBLEM, tokenizer) for name in FORMATS]
    for many in (texts, ["", *texts], []):
        assert encode_texts(many, tokenizer) == [encode_text(one, tokenizer) for one in many]


def test_many_texts_and_a_tokenizer_with_a_way_of_its_own() -> None:
    class Own(PreTrainedTokenizerFast):
        def encode(self, text: str, **options: object) -> list[int]:  # type: ignore[override]
            return [7, *super().encode(text, **options)]  # type: ignore[arg-type]

    own = Own(tokenizer_object=make_tokenizer().backend_tokenizer)
    assert encode_texts(["a b"], own) == [own.encode("a b", add_special_tokens=False)]
    assert encode_texts(["Hello, world"], WordTokenizer()) == [[9707, 11, 1879]]


@pytest.mark.parametrize("kind", ["with_bos", "with_template"])
def test_bos_is_one_token_in_front(kind: str, tokenizers: Tokenizers) -> None:
    for name in FORMATS:
        ids = encode_prompt(make_format(name), PROBLEM, tokenizers[kind])
        assert (ids == tokenizers[kind].bos_token_id).nonzero()[0].tolist() == [0]


@pytest.mark.parametrize("response", [" so", "so", "\nso", "so in a b"])
@pytest.mark.parametrize("before", ["a b", "a:", "a\n", "b <th", "a</s>"])
def test_no_space_comes_between_prompt_and_response(before: str, response: str) -> None:
    tokenizer = make_spacing_tokenizer()
    demonstration = Demonstration(PROBLEM, prompt=before, response=response)
    ids = encode_demonstration(make_format("question_only"), demonstration, tokenizer).ids_T
    whole = tokenizer.encode(before + response, add_special_tokens=False)
    assert tokenizer.decode(ids[:-1]) == tokenizer.decode(whole)
    if not (before == "b <th" and response.startswith("in")):
        assert ids[:-1].tolist() == whole


def test_tokens_of_the_prompt_stay_where_the_response_could_join_them() -> None:
    """`so` is a token, and so is `▁so`; a prompt that ends in `s` keeps its own."""
    tokenizer = make_spacing_tokenizer()
    assert tokenizer.convert_ids_to_tokens(encode_continuation("o b", "a s", tokenizer)) == ["o", "▁b"]


def test_a_vocabulary_without_letters_goes_on_too() -> None:
    figures = Tokenizer(models.BPE({character: number for number, character in enumerate("0123456789+=.")}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=figures, eos_token=".", pad_token=".")
    assert tokenizer.encode("a") == []
    assert encode_continuation("12", "7+5=", tokenizer) == [1, 2]


def test_words_that_a_tokenizer_cannot_write_are_told_once() -> None:
    tokenizer = tiny_tokenizer()

    def ask(question: str) -> None:
        warn_of_unknown_words(Problem((Message("user", question),)), tokenizer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask("how many stones ?")
        ask("<unk> stones ?")
    with pytest.warns(
        LemmaWarning, match=r"no tokens for words of the question \('zebras', 'fly'\): .* reads <unk> in"
    ):
        ask("how many zebras fly ?")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask("how many lions fly ?")


def test_a_prompt_that_begins_twice_is_told(tokenizers: Tokenizers) -> None:
    twice = Demonstration(PROBLEM, prompt="<s><s>Q", response="so")
    with pytest.warns(LemmaWarning, match="prompts begin with <s> twice"):
        encode_demonstration(make_format("r1_zero"), twice, tokenizers["with_bos"])
    doubling = make_tokenizer(bos=True, template="<s>{{ bos_token }}{{ messages[0]['content'] }}")
    with pytest.warns(LemmaWarning, match="or from the tokenizer's chat template"):
        encode_prompt(make_format("own"), PROBLEM, doubling)


def test_masks_do_not_look_at_values(tokenizers: Tokenizers) -> None:
    """End-of-sequence inside a prompt is not learnt; inside a response, where it is also the pad, it is."""
    tokenizer = tokenizers["pad_is_eos"]
    demonstration = Demonstration(PROBLEM, prompt="a</s>b", response="c</s>d")
    trajectory = encode_demonstration(make_format("question_only"), demonstration, tokenizer)
    eos = tokenizer.eos_token_id
    assert [(int(i) == eos, bool(c)) for i, c in zip(trajectory.ids_T, trajectory.loss_mask_T, strict=True)] == [
        (False, False), (True, False), (False, False), (False, True), (True, True), (False, True), (True, True),
    ]  # fmt: skip


def test_training_on_everything_leaves_out_the_first_token_only(tokenizers: Tokenizers) -> None:
    trajectory = encode_demonstration(make_format("r1_zero"), WORKED, tokenizers["plain"], train_on="all")
    assert not trajectory.loss_mask_T[0] and trajectory.loss_mask_T[1:].all()
    without_prompt = Demonstration(PROBLEM, prompt="", response="abc")
    trajectory = encode_demonstration(make_format("question_only"), without_prompt, tokenizers["plain"])
    assert not trajectory.loss_mask_T[0] and trajectory.loss_mask_T[1:].all()


def test_a_verbatim_prompt_replaces_the_formats(tokenizers: Tokenizers) -> None:
    fmt = make_format("r1_zero")
    demonstration = Demonstration(PROBLEM, prompt="Preamble\n\nUser: 2 + 2\nAssistant: <think>", response=" so")
    for kind, front in {"plain": "", "with_bos": "<s>"}.items():
        ids = encode_demonstration(fmt, demonstration, tokenizers[kind]).ids_T
        assert tokenizers[kind].decode(ids) == front + demonstration.prompt + " so</s>"
    again = Demonstration(PROBLEM, prompt="<s>Q", response="so")
    assert tokenizers["with_bos"].decode(encode_demonstration(fmt, again, tokenizers["with_bos"]).ids_T) == "<s>Qso</s>"


def test_a_written_out_eos_is_not_doubled(tokenizers: Tokenizers) -> None:
    demonstration = Demonstration(PROBLEM, response="so</s>")
    ids = encode_demonstration(make_format("question_only"), demonstration, tokenizers["plain"]).ids_T
    assert (ids == tokenizers["plain"].eos_token_id).sum() == 1


@pytest.mark.parametrize("response", ["", " \n", "</s>", "<think>"])
def test_an_empty_response_is_named(response: str, tokenizers: Tokenizers) -> None:
    with pytest.raises(UserError, match="problem row-7 has an empty response; remove the row or fill in"):
        encode_demonstration(make_format("r1_zero"), Demonstration(PROBLEM, response=response), tokenizers["plain"])


def test_a_tokenizer_without_eos_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token; set eos_token"):
        encode_demonstration(make_format("r1_zero"), WORKED, tokenizer)


def test_a_document_is_one_text_between_bos_and_eos(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers["with_bos"]
    ids = encode_document(make_format("alpaca"), Demonstration(PROBLEM, response="It is 4."), tokenizer)
    body = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nWhat is 2 + 2?\n\n### Response:\nIt is 4."
    )
    assert ids.tolist() == [
        tokenizer.bos_token_id,
        *tokenizer.encode(body, add_special_tokens=False),
        tokenizer.eos_token_id,
    ]


def test_documents_are_cut_blindly_and_labels_cross_borders() -> None:
    inputs, labels = pack_documents([[1, 2, 3], np.array([4, 5]), [], [6, 7, 8, 9]], 4)
    assert inputs.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert labels.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    inputs, labels = pack_documents([[1, 2, 3, 4, 5, 6, 7, 8]], 4)
    assert (inputs.tolist(), labels.tolist()) == ([[1, 2, 3, 4]], [[2, 3, 4, 5]])
    for few in ([], [[1, 2, 3, 4]]):
        inputs, labels = pack_documents(few, 4)
        assert inputs.shape == labels.shape == (0, 4)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=9), st.integers(1, 7))
def test_packing_loses_less_than_one_chunk_and_a_label(documents: list[list[int]], length: int) -> None:
    stream = [token for document in documents for token in document]
    inputs, labels = pack_documents(documents, length)
    assert inputs.ravel().tolist() == stream[: inputs.size]
    assert labels.ravel().tolist() == stream[1 : inputs.size + 1]
    assert len(stream) - inputs.size <= length


def test_prompts_and_outputs_as_in_the_reference() -> None:
    sentences = ["Hello, world!", "This is a test.", "This is another test."]
    batch = tokenize_prompt_and_output(sentences, sentences, WordTokenizer())
    hello, test, another = [9707, 11, 1879, 0], [1986, 374, 264, 1273, 13], [1986, 374, 2441, 1273, 13]
    whole = torch.tensor([[*hello, *hello, 151643, 151643], test * 2, another * 2])
    assert set(batch) == {"input_ids", "labels", "response_mask"}
    assert all(tensor.shape == (3, 9) for tensor in batch.values())
    assert torch.equal(batch["input_ids"], whole[:, :-1])
    assert torch.equal(batch["labels"], whole[:, 1:])
    assert batch["response_mask"].dtype == torch.bool
    assert batch["response_mask"].int().tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1, 1],
    ]  # fmt: skip


def test_prompts_and_outputs_must_pair_up() -> None:
    with pytest.raises(ValueError, match="shorter"):
        tokenize_prompt_and_output(["Hello", "Hello"], ["Hello"], WordTokenizer())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_text_has_the_ids_that_transformers_gives_it_however_the_tokenizer_is_set_up(kind: str) -> None:
    tokenizer, text = all_tokenizers()[kind], "eva has 3 pens <eos> </s> . é 漢 how many ?"
    for split in (False, True):
        tokenizer.split_special_tokens = split
        expected = list(tokenizer.encode(text, add_special_tokens=False))
        assert encode_text(text, tokenizer) == expected
        tokenizer.backend_tokenizer.enable_truncation(2)
        tokenizer.backend_tokenizer.enable_padding(length=64)
        assert encode_text(text, tokenizer) == expected
        tokenizer.backend_tokenizer.encode_special_tokens = not split
        assert encode_text(text, tokenizer) == expected
