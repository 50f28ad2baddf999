"""Small byte-level tokenizers, made on the spot: any text survives encoding and decoding."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["User: What is 2+2? Assistant: <think> two and two are four </think> <answer> 4 </answer>"] * 4
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]

THEIR_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}\n"
)


@cache
def _bytes() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def make_tokenizer(*, bos: bool = False, pad: str = "<pad>", template: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bytes()),
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def all_tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {
        "plain": make_tokenizer(),
        "with_bos": make_tokenizer(bos=True),
        "pad_is_eos": make_tokenizer(pad="</s>"),
        "with_template": make_tokenizer(bos=True, template=THEIR_TEMPLATE),
    }
