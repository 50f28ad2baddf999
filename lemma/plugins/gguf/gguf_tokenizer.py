"""A tokenizer from the metadata of a GGUF file.

A GGUF holds tokens, merges or scores, and the name of the rule that cuts text into words (`tokenizer.ggml.pre`), not
the rule itself. The rules here are those of the published tokenizers, by the names that llama.cpp gives them; without
the right one numbers, spaces and line breaks would become other tokens than the model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lemma.core.errors import UserError

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
SPACE = "▁"
# What transformers takes for no limit.
UNLIMITED = int(1e30)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = r"\p{N}"


def _words(digits: str) -> str:
    """Llama 3's words and those of its relatives, which differ in how many digits go together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )


def _cased(digits: str, ending: str) -> str:
    """Words that end where small letters turn into capitals."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    front = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{front}{upper}*{lower}+{ending}|{front}{upper}+{lower}*{ending}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# Letters that have cases, as the Unicode of DeepSeek's tokenizers knew them.
DEEPSEEK_LETTERS = """
41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 3a3-3f5
3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15
1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc
1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134
2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787
a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2
118a0-118df 1e900-1e943"""


def _ranges(text: str) -> str:
    """A class of characters from ranges of code points."""
    ranges = ("-".join(f"\\x{{{end}}}" for end in part.split("-")) for part in text.split())
    return f"[{''.join(ranges)}]"


CHINESE = _ranges("4e00-9fa5 800-4e00 ac00-d7ff") + "+"


@dataclass(frozen=True)
class Rule:
    """How text is cut into words, one pattern after the other, and what else goes with it."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is a token needs no merges."""
    adds_bos: bool = False
    """What holds where the file does not say whether text begins with BOS."""
    composes: bool = False
    """Letters and their accents are put together first (NFC)."""


RULES: dict[str, Rule] = {
    "gpt-2": Rule((GPT2,)),
    "mpt": Rule((GPT2,), composes=True),
    "llama-bpe": Rule((_words(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True),
    "chatglm-bpe": Rule((_words(r"\p{N}{1,3}"),)),
    "qwen2": Rule((_words(DIGITS),), composes=True),
    "deepseek-r1-qwen": Rule((_words(DIGITS),)),
    "starcoder": Rule((DIGITS, GPT2)),
    "falcon": Rule((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-llm": Rule(
        (
            r"[\r\n]",
            r"\s?" + _ranges(DEEPSEEK_LETTERS) + "+",
            r"\s?" + _ranges("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002") + "+",
            r"\s+$",
            CHINESE,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, DIGITS)),
    "deepseek-v3": Rule(
        (
            r"\p{N}{1,3}",
            _ranges("4e00-9fa5 3040-309f 30a0-30ff") + "+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "tekken": Rule((_cased(DIGITS, ""),), whole_words=True, adds_bos=True),
    "gpt-4o": Rule((_cased(r"\p{N}{1,3}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),)),
}
SAME = {
    "gpt-2": ("phi-2", "jais", "trillion", "gigachat", "exaone4"),
    "mpt": ("olmo",),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "chatglm-bpe": ("glm4", "dbrx", "smaug-bpe"),
    "deepseek-r1-qwen": ("stablelm2", "megrez"),
    "starcoder": ("refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
    "gpt-4o": ("llama4",),
}
RULES |= {other: RULES[name] for name, others in SAME.items() for other in others}


def build_tokenizer(metadata: Mapping[str, Any], file: str) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata describes, special tokens, chat template and all."""
    about = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind, tokens = about.get("model"), about.get("tokens")
    if not isinstance(tokens, list) or kind not in ("gpt2", "llama"):
        raise _refusal(file, f"is of a kind that Lemma does not read ({kind or 'none'})")
    types = about.get("token_type") or [1] * len(tokens)
    if kind == "gpt2":
        rule = _rule(about.get("pre"), file)
        tokenizer, adds_bos = _byte_level(tokens, about.get("merges") or [], rule), rule.adds_bos
    else:
        prefix = bool(about.get("add_space_prefix", True))
        tokens = [token.replace(SPACE, " ") if types[i] == USER_DEFINED else token for i, token in enumerate(tokens)]
        unknown = _token(about, "unknown", tokens)
        tokenizer = _sentencepiece(tokens, types, about.get("scores") or [0.0] * len(tokens), unknown, prefix=prefix)
        adds_bos = True
    name = str(metadata.get("general.name", "")).lower()
    _add_special(tokenizer, tokens, types, strips="phi-3" in name or "phi3" in name)
    bos, eos = _token(about, "bos", tokens), _token(about, "eos", tokens)
    front = [bos] if bos is not None and about.get("add_bos_token", adds_bos) else []
    back = [eos] if eos is not None and about.get("add_eos_token", False) else []
    if front or back:
        tokenizer.post_processor = _wrapping(tokenizer, front, back)
    template = metadata.get("tokenizer.chat_template")
    named = {"bos_token": bos, "eos_token": eos, "unk_token": _token(about, "unknown", tokens)}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **named,
        pad_token=_token(about, "padding", tokens),
        clean_up_tokenization_spaces=False,
        model_max_length=int(metadata.get(f"{metadata['general.architecture']}.context_length", UNLIMITED)),
        chat_template=template if isinstance(template, str) and template.strip() else None,
    )


def _refusal(file: str, what: str) -> UserError:
    return UserError(
        f"the tokenizer in {file} {what}", fix="name the folder of the model's published tokenizer as model.tokenizer"
    )


def _rule(name: Any, file: str) -> Rule:
    if name in (None, "default"):
        raise _refusal(file, "does not say how text is cut into words (tokenizer.ggml.pre)")
    if name not in RULES:
        raise _refusal(file, f"cuts text into words by a rule '{name}' that Lemma does not know")
    return RULES[name]


def _token(about: Mapping[str, Any], what: str, tokens: Sequence[str]) -> str | None:
    number = about.get(f"{what}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _byte_level(tokens: Sequence[str], merges: Sequence[str], rule: Rule) -> Tokenizer:
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=rule.whole_words))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown: str | None, *, prefix: bool
) -> Tokenizer:
    """Pieces whose scores say which pair is merged first; what is no piece becomes bytes."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind not in (UNKNOWN, CONTROL, BYTE)}
    ranked = []
    for token in pieces:
        score = scores[vocabulary[token]]
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in pieces and second in pieces:
                ranked.append((-score, -len(first), vocabulary[first], first, second))
    ranked.sort()
    merges = [(first, second) for *_, first, second in ranked]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return tokenizer


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], *, strips: bool) -> None:
    """Tokens that are found as they are written. Those of Phi-3 swallow the white space that follows them."""
    plain = ("<unk>", "<s>", "<|endoftext|>")

    def tokens_of(kind: int) -> list[AddedToken]:
        chosen = (token for token, its in zip(tokens, types, strict=True) if its == kind)
        return [
            AddedToken(t, rstrip=strips and t not in plain, normalized=False, special=kind == CONTROL) for t in chosen
        ]

    tokenizer.add_special_tokens(tokens_of(CONTROL))
    tokenizer.add_tokens(tokens_of(USER_DEFINED))


def _wrapping(tokenizer: Tokenizer, front: Sequence[str], back: Sequence[str]) -> Any:
    single = [*front, "$A", *back]
    pair = [*front, "$A", *back, *(f"{token}:1" for token in front), "$B:1", *(f"{token}:1" for token in back)]
    ids = [(token, tokenizer.token_to_id(token)) for token in {*front, *back}]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
