"""Text to token ids, once. Masks are made from positions, never from token values: pad may equal end-of-sequence."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lemma.core.errors import UserError, warn
from lemma.core.types import Demonstration, Problem, Trajectory
from lemma.formats.format import Format, about

if TYPE_CHECKING:
    import torch

THINK = "<think>"
# How many words that a tokenizer cannot write are shown.
MANY = 5
_TOLD: weakref.WeakSet[Any] = weakref.WeakSet()


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """The ids of a text in which special tokens, if any, are written out."""
    backend = _plain_backend(tokenizer) if text else None
    if backend is not None:
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def _plain_backend(tokenizer: Any) -> Any | None:
    """What encodes a text in a tokenizer of the usual kind, in half of the time; None where the tokenizer does more, or
    would set it up in another way first."""
    kind: Any = type(tokenizer)
    if not _is_usual(kind):
        return None
    backend = tokenizer.backend_tokenizer
    is_set_up = backend.truncation is None and backend.padding is None
    return backend if is_set_up and backend.encode_special_tokens == tokenizer.split_special_tokens else None


@lru_cache(maxsize=16)
def _is_usual(kind: type) -> bool:
    from transformers import PreTrainedTokenizerFast

    names = ("encode", "_encode_plus", "backend_tokenizer")
    return all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name) for name in names)


def encode_texts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """`encode_text` for many texts, in one call on all cores if the tokenizer has no `encode` of its own."""
    from transformers import PreTrainedTokenizerFast

    is_usual = getattr(type(tokenizer), "encode", None) is PreTrainedTokenizerFast.encode
    if is_usual and texts and all(texts):
        return list(tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    return [encode_text(text, tokenizer) for text in texts]


def encode_continuation(text: str, before: str, tokenizer: Any) -> list[int]:
    """The ids of a text that continues another one, such that the two id lists together are those of the whole text.

    A tokenizer that prepends a space to any text (Llama 2, Phi-3) would put one between the two. Other tokenizers get
    the text by itself.
    """
    if not puts_space_in_front(tokenizer):
        return encode_text(text, tokenizer)
    for front in (before, "\n"):
        known, whole = encode_text(front, tokenizer), encode_text(front + text, tokenizer)
        if whole[: len(known)] == known:
            return whole[len(known) :]
    return encode_text(text, tokenizer)


def puts_space_in_front(tokenizer: Any) -> bool:
    """Whether the ids of a text begin with a space that is not in the text."""
    tokens = tokenizer.convert_ids_to_tokens(encode_text("a", tokenizer))
    # As SentencePiece and byte-level vocabularies write a space. A digits-only vocabulary may not contain the letter.
    return "".join(tokens[:1]).startswith(("▁", "Ġ"))


def encode_prompt(fmt: Format, problem: Problem, tokenizer: Any) -> np.ndarray:
    """The ids that an engine continues."""
    ids = encode_text(fmt.prompt(problem, tokenizer), tokenizer)
    check_beginning(ids, tokenizer)
    return np.asarray(ids, dtype=np.int64)


def encode_demonstration(
    fmt: Format, demonstration: Demonstration, tokenizer: Any, train_on: Literal["response", "all"] = "response"
) -> Trajectory:
    """Prompt and target, each with its own tokens, then the end-of-sequence token, which is trained on as well."""
    asked = prompt_text(fmt, demonstration, tokenizer)
    prompt = encode_text(asked, tokenizer)
    target = encode_continuation(target_text(fmt, demonstration, tokenizer, asked), asked, tokenizer)
    check_beginning(prompt, tokenizer)
    ids_T = np.asarray([*prompt, *target, end_of(tokenizer)], dtype=np.int64)
    loss_mask_T = np.arange(len(ids_T)) >= (len(prompt) if train_on == "response" else 0)
    loss_mask_T[0] = False
    return Trajectory(
        ids_T=ids_T, loss_mask_T=loss_mask_T, origin="teacher", finish="given", problem_id=demonstration.problem.id
    )


def encode_learnt(
    fmt: Format,
    item: Demonstration,
    tokenizer: Any,
    turns: Literal["all", "last", "played"],
    learn: Literal["response", "all"],
) -> list[Trajectory]:
    """A demonstration with these turns trained on, or with all of its tokens: one sequence, or several if necessary."""
    if not item.earlier_turns or turns == "last" or (turns, learn) == ("all", "all"):
        return [encode_demonstration(fmt, item, tokenizer, learn)]
    from lemma.formats.turns import encode_played, encode_turns

    if turns == "all":
        return encode_turns(fmt, item, tokenizer)
    played = encode_played(fmt, item, tokenizer)
    if learn == "all":
        played.loss_mask_T = np.arange(len(played)) > 0
    return [played]


def encode_document(fmt: Format, demonstration: Demonstration, tokenizer: Any) -> np.ndarray:
    """Prompt and response tokenised as one text, then the end-of-sequence token: one document of a stream."""
    asked = prompt_text(fmt, demonstration, tokenizer)
    text = asked + target_text(fmt, demonstration, tokenizer, asked)
    ids = encode_text(text, tokenizer)
    check_beginning(ids, tokenizer)
    return np.asarray([*ids, end_of(tokenizer)], dtype=np.int64)


def pack_documents(documents: Sequence[Sequence[int] | np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate documents and cut the stream every `length` tokens: inputs and labels, both (N, length).

    A label is the next token, also across the border of a chunk or a document. The incomplete last chunk is dropped.
    """
    assert length >= 1, "a chunk has at least one token"
    stream = np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(ids, dtype=np.int64) for ids in documents)])
    whole = max(len(stream) - 1, 0) // length * length
    return stream[:whole].reshape(-1, length), stream[1 : whole + 1].reshape(-1, length)


def tokenize_prompt_and_output(
    prompts: Sequence[str], outputs: Sequence[str], tokenizer: Any
) -> dict[str, torch.Tensor]:
    """A padded batch for plain training loops: `input_ids`, `labels` and `response_mask`, each (B, longest - 1).

    Prompt and output are tokenised separately, joined and padded on the right; labels are the next tokens, and the
    mask marks the labels that belong to the output.
    """
    import torch

    pairs = [
        (encode_text(prompt, tokenizer), encode_text(output, tokenizer))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_of(tokenizer)
    longest = max((len(prompt) + len(output) for prompt, output in pairs), default=0)
    ids_BT = torch.full((len(pairs), longest), pad, dtype=torch.long)
    mask_BT = torch.zeros((len(pairs), longest), dtype=torch.bool)
    for row, (prompt, output) in enumerate(pairs):
        ids_BT[row, : len(prompt) + len(output)] = torch.tensor([*prompt, *output], dtype=torch.long)
        mask_BT[row, len(prompt) : len(prompt) + len(output)] = True
    return {"input_ids": ids_BT[:, :-1], "labels": ids_BT[:, 1:], "response_mask": mask_BT[:, 1:]}


def check_beginning(ids: Sequence[int], tokenizer: Any) -> None:
    """Warn about a prompt that begins with BOS twice; formats do not write that, but data and chat templates may."""
    begin = getattr(tokenizer, "bos_token_id", None)
    if begin is not None and list(ids[:2]) == [begin, begin]:
        warn(
            f"prompts begin with {tokenizer.bos_token} twice, which the model has never seen; remove one from the "
            "data's own prompts, or from the tokenizer's chat template"
        )


def warn_of_unknown_words(problem: Problem, tokenizer: Any) -> None:
    """Warn, once for each tokenizer, about words of a question that it cannot write."""
    unknown, question = getattr(tokenizer, "unk_token_id", None), problem.question
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if unknown is None or unknown in ends or tokenizer in _TOLD or unknown not in encode_text(question, tokenizer):
        return
    words = [word for word in dict.fromkeys(question.split()) if unknown in encode_text(word, tokenizer)]
    words = [word for word in words if word != tokenizer.unk_token]
    if words:
        _TOLD.add(tokenizer)
        shown = ", ".join(map(repr, words[:MANY])) + (", ..." if len(words) > MANY else "")
        warn(
            f"the tokenizer has no tokens for words of the question ({shown}): the model reads {tokenizer.unk_token} "
            "in their place; use words of its vocabulary, or a model with another tokenizer"
        )


def prompt_text(fmt: Format, demonstration: Demonstration, tokenizer: Any) -> str:
    """The dataset's own prompt if it has one, with BOS in front as in the format's."""
    if demonstration.prompt is None:
        return fmt.prompt(demonstration.problem, tokenizer)
    if fmt.wants_bos(tokenizer) and not demonstration.prompt.startswith(tokenizer.bos_token):
        return str(tokenizer.bos_token) + demonstration.prompt
    return demonstration.prompt


def target_text(fmt: Format, demonstration: Demonstration, tokenizer: Any, asked: str) -> str:
    """The response without its end-of-sequence token, which datasets sometimes include, and without the `<think>` that
    the prompt ends in."""
    said = _called(fmt, demonstration, tokenizer) if demonstration.more else fmt.target(demonstration)
    target = said.removesuffix(getattr(tokenizer, "eos_token", None) or "")
    if demonstration.prompt is None and asked.rstrip().endswith(THINK) and target.lstrip().startswith(THINK):
        target = target.lstrip().removeprefix(THINK)
        target = target.removeprefix("\n") if asked.endswith("\n") else target
    if not target.strip():
        raise UserError(
            f"the demonstration of problem {demonstration.problem.id} has an empty response",
            fix="remove the row or fill in its response",
        )
    return target


def _called(fmt: Format, demonstration: Demonstration, tokenizer: Any) -> str:
    """A response with tool calls, as the chat template writes it."""
    problem, turns = demonstration.problem, fmt.messages(demonstration.problem)
    last = {"role": "assistant", "content": demonstration.response or "", **demonstration.more}
    tools = problem.extra.get("tools")
    before = fmt.written(turns, tokenizer, tools=tools, about=about(problem))
    after = fmt.written([*turns, last], tokenizer, tools=tools, is_open=False, about=about(problem))
    if not after.startswith(before):
        raise UserError(
            f"the chat template writes the tool call of {about(problem)} differently from how a model writes it",
            fix="use a model whose template supports tools, or leave such rows out",
        )
    return after[len(before) :].rstrip()


def end_of(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-sequence token", fix="set eos_token in its tokenizer_config.json")
    return int(tokenizer.eos_token_id)
