"""Small byte-level tokenizers, made on the spot: any text survives encoding and decoding."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
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


def make_tokenizer(
    *, bos: bool | str = False, adds_bos: bool = True, pad: str = "<pad>", template: str | None = None
) -> PreTrainedTokenizerFast:
    """With `bos`, the token `<s>` (or that one) begins texts; without `adds_bos`, only where somebody writes it."""
    backend = Tokenizer.from_str(_bytes())
    begin = "<s>" if bos is True else bos or None
    if begin is not None and adds_bos:
        known = [(begin, backend.token_to_id(begin))]
        backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=known)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=begin,
        eos_token="</s>",
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def make_spacing_tokenizer() -> PreTrainedTokenizerFast:
    """One that puts a space in front of whatever it is given, as those of Llama 2 and Phi-3 do."""
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz:<>/"]
    words = ["▁a", "▁b", "▁t", "th", "in", "k>", "▁th", "so", "▁so"]
    merges = [
        ("▁", "a"),
        ("▁", "b"),
        ("▁", "t"),
        ("t", "h"),
        ("i", "n"),
        ("k", ">"),
        ("▁", "th"),
        ("s", "o"),
        ("▁", "so"),
    ]
    model = models.BPE(
        {piece: number for number, piece in enumerate([*pieces, *words])},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(undo)
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


KINDS = ("plain", "with_bos", "with_unused_bos", "with_bos_of_turns", "pad_is_eos", "with_template")


def all_tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    made = {
        "plain": make_tokenizer(),
        "with_bos": make_tokenizer(bos=True),
        "with_unused_bos": make_tokenizer(bos=True, adds_bos=False),
        "with_bos_of_turns": make_tokenizer(bos="<|im_start|>"),
        "pad_is_eos": make_tokenizer(pad="</s>"),
        "with_template": make_tokenizer(bos=True, template=THEIR_TEMPLATE),
    }
    assert tuple(made) == KINDS
    return made
