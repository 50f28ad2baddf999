"""A reward model: a sequence-classification model with one output, by path or hub name, run in batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from lemma.rewards.base import Reward, RewardInput


class RewardModel(Reward):
    """The score of a trained model on the question and the completion."""

    name: Literal["reward_model"] = "reward_model"
    """Which reward."""
    path: str
    """Folder or hub name of a sequence-classification model with one output."""
    batch: int = Field(16, ge=1)
    """Completions scored at a time."""
    max_tokens: int = Field(4096, ge=8)
    """Longer texts lose their beginning."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; auto takes a GPU where there is one."""

    def score_all(self, items: Sequence[RewardInput]) -> list[float | None]:
        model, tokenizer = _load(self.path, self.device)
        texts = [_text(tokenizer, item) for item in items]
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        scores: list[float | None] = [None] * len(texts)
        for start in range(0, len(order), self.batch):
            places = order[start : start + self.batch]
            values = _scores(model, tokenizer, [texts[place] for place in places], self.max_tokens)
            for place, value in zip(places, values, strict=True):
                scores[place] = value
        return scores


@lru_cache(maxsize=2)
def _load(path: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from lemma.core.errors import UserError

    try:
        model: Any = AutoModelForSequenceClassification.from_pretrained(path)
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the reward model '{path}' cannot be loaded ({str(error).splitlines()[0]})",
            fix="give the path of a sequence-classification model with its tokenizer",
        ) from error
    if model.config.num_labels != 1:
        raise UserError(
            f"the reward model '{path}' has {model.config.num_labels} outputs", fix="use a model with one output"
        )
    tokenizer.truncation_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(chosen).eval(), tokenizer


def _text(tokenizer: Any, item: RewardInput) -> str:
    """The conversation as the model's own template writes it, or question and completion on lines of their own."""
    if tokenizer.chat_template:
        turns = [message.as_dict() for message in item.problem.messages]
        turns.append({"role": "assistant", "content": item.completion})
        return str(tokenizer.apply_chat_template(turns, tokenize=False))
    return item.problem.question + "\n" + item.completion


def _scores(model: Any, tokenizer: Any, texts: list[str], max_tokens: int) -> list[float]:
    import torch

    batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=max_tokens)
    with torch.inference_mode():
        logits_B1 = model(**{key: value.to(model.device) for key, value in batch.items()}).logits
    return [float(value) for value in logits_B1[:, 0].float()]
