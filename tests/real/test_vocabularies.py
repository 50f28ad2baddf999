"""Every format with vocabularies and chat templates of published models: no token lost, doubled or out of place."""

from __future__ import annotations

import numpy as np
import pytest

from lemma.core.types import Demonstration, Message, Problem
from lemma.formats import FORMATS, make_format
from lemma.formats.chat import ChatFormat
from lemma.formats.encode import encode_demonstration, encode_document, encode_prompt, encode_text
from lemma.formats.format import adds_bos
from lemma.plugins.gguf.gguf import find_ends
from tests.real.conftest import Speaker, Vocabulary, read_once

# What the published tokenizers put in front of a text: that of Llama 3, Phi-3 and others BOS, the others nothing.
BEGINS = {"command-r", "deepseek-coder", "deepseek-llm", "llama-bpe", "llama-spm", "phi-3"}
# Whose chat templates write BOS. That of Phi-3.5 leaves out what the tokenizer of Phi-3 puts in front of a text.
WRITTEN_BY_TEMPLATES = {"smollm2", "llama-bpe", "deepseek-llm"}
# A token of these vocabularies is the letter itself, which their decoders take for a byte, as the published ones do.
BROKEN_LETTERS = {"deepseek-coder": "F\u00fchrer", "deepseek-llm": "F\u00fchrer"}
ENDS = {
    "smollm2": ["<|im_end|>"],
    "qwen2": ["<|endoftext|>", "<|im_end|>"],
    "llama-bpe": ["<|end_of_text|>", "<|eot_id|>"],
    "phi-3": ["<|endoftext|>", "<|end|>"],
    "deepseek-llm": ["<\uff5cend\u2581of\u2581sentence\uff5c>"],
    "gpt-2": ["<|endoftext|>"],
    "llama-spm": ["</s>"],
}
SPACING = ("phi-3", "llama-spm")

QUESTION = "Tom's 3 boxes hold 1234.5 g each;\n\n  how much is \u00bd of it? {{ it }} \u4f60\u597d \U0001f642"
REASONING = "3 * 1234.5 = 3703.5\n\n3703.5 / 2 =  1851.75\t(it's half)"
PROBLEM = Problem((Message("user", QUESTION),), golds=("1851.75",))
WORKED = Demonstration(PROBLEM, reasoning=REASONING, answer="1851.75")


def test_ids_are_those_of_llama_cpp(vocabulary: Vocabulary) -> None:
    tokenizer = read_once(vocabulary.gguf)
    assert len(vocabulary.samples) > 40
    for text, ids in vocabulary.samples:
        assert tuple(encode_text(text, tokenizer)) == ids, text
        assert tokenizer.decode(ids) == text or text == BROKEN_LETTERS.get(vocabulary.name), text
    assert adds_bos(tokenizer) == (vocabulary.name in BEGINS)


@pytest.mark.parametrize("name", FORMATS)
def test_prompt_and_response_are_whole(name: str, speaker: Speaker) -> None:
    fmt, tokenizer = make_format(name), speaker.tokenizer
    prompt, target = fmt.prompt(PROBLEM, tokenizer), fmt.target(WORKED)
    if prompt.rstrip().endswith("<think>"):  # the template has opened the thoughts already
        target = target.removeprefix("<think>")
    ids = encode_prompt(fmt, PROBLEM, tokenizer)
    learnt = encode_demonstration(fmt, WORKED, tokenizer)
    border = int(learnt.loss_mask_T.argmax())
    assert np.array_equal(learnt.ids_T[:border], ids) and learnt.loss_mask_T[border:].all()
    assert learnt.ids_T[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in learnt.ids_T[border:-1]
    both = learnt.ids_T[:-1]
    if speaker.name in SPACING:  # a space after a special token is no part of the text
        assert both.tolist() == encode_text(prompt + target, tokenizer)
        assert tokenizer.decode(both).split() == tokenizer.decode(encode_text(prompt + target, tokenizer)).split()
        assert "".join(tokenizer.decode(both).split()) == "".join((prompt + target).split())
    else:
        assert tokenizer.decode(ids) == prompt
        assert tokenizer.decode(learnt.ids_T[border:-1]) == target
        assert tokenizer.decode(both) == prompt + target
    assert tokenizer.decode(encode_document(fmt, WORKED, tokenizer)[:-1]) == tokenizer.decode(both)
    assert fmt.parse(fmt.target(WORKED)).answer == "1851.75"


@pytest.mark.parametrize("name", FORMATS)
def test_the_beginning_is_there_once(name: str, speaker: Speaker) -> None:
    fmt, tokenizer = make_format(name), speaker.tokenizer
    prompt, ids = fmt.prompt(PROBLEM, tokenizer), encode_prompt(fmt, PROBLEM, tokenizer).tolist()
    begin = tokenizer.bos_token_id
    assert ids[:2] != [begin, begin]
    if isinstance(fmt, ChatFormat) and tokenizer.chat_template:
        assert (ids[0] == begin) == (speaker.name in WRITTEN_BY_TEMPLATES)
        return
    turns_begin = speaker.name == "smollm2" and prompt.startswith("<|im_start|>")
    assert (ids[0] == begin) == (speaker.name in BEGINS or turns_begin)
    verbatim = Demonstration(PROBLEM, prompt=prompt, response="so")
    assert encode_demonstration(fmt, verbatim, tokenizer).ids_T[: len(ids)].tolist() == ids


def test_generation_ends_where_turns_end(speaker: Speaker) -> None:
    tokenizer = speaker.tokenizer
    ends = tokenizer.convert_ids_to_tokens(find_ends(tokenizer, speaker.gguf))
    assert ends == ENDS[speaker.name] if tokenizer.chat_template else ends == ENDS[speaker.name][:1]
