"""A reward model: a sequence-classification model with one output, by path or hub name, run in batches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lemma.core.errors import UserError, nearest
from lemma.formats.templates import rendering
from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput


class RewardModel(Reward):
    """The score of a trained model on the question and the completion."""

    name: Literal["reward_model"] = "reward_model"
    """Which reward."""
    path: str
    """Folder or hub name of a sequence-classification model with one output."""
    batch: int = Field(16, ge=1)
    """Completions scored at a time."""
    max_tokens: int = Field(4096, ge=8)
    """Maximum length of a text; longer ones are truncated at the beginning."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; auto uses a GPU if there is one."""

    def check(self) -> None:
        """Refuse a path without such a model, by its files alone; for a hub model the configuration is fetched."""
        folder = Path(self.path).expanduser()
        config = _read_config(self.path, folder / "config.json" if folder.exists() else _from_hub(self.path))
        generator = next(
            (str(name) for name in config.get("architectures") or () if str(name).endswith(GENERATORS)), None
        )
        if generator:
            what = f"'{self.path}' is a language model ({generator}), which writes text, and no reward model"
            raise UserError(what, fix=FIX)
        labels = config.get("id2label")
        # A configuration that does not say has two, as in transformers.
        outputs = len(labels) if labels and isinstance(labels, dict) else config.get("num_labels", 2)
        if outputs != 1:
            raise _too_many(self.path, outputs)
        for what, names in PARTS.items() if folder.exists() else ():
            if not any(found for name in names for found in folder.glob(name)):
                raise UserError(f"the reward model '{self.path}' has no {what}", fix=FIX)
        for file in sorted(folder.glob("*.safetensors")):
            _check_whole(self.path, file)

    @property
    def may_use_device(self) -> bool:
        return True

    @property
    def files(self) -> list[Path]:
        folder = Path(self.path).expanduser()
        names = ("config.json", *(name for names in PARTS.values() for name in names))
        return sorted({file for name in names for file in folder.glob(name)}) if folder.is_dir() else []

    def score_all(self, items: Sequence[RewardInput]) -> list[float | None]:
        model, tokenizer, padding = _load(self.path, self.device)
        texts = [_text(tokenizer, item) for item in items]
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        scores: list[float | None] = [None] * len(texts)
        for start in range(0, len(order), self.batch):
            places = order[start : start + self.batch]
            values = _scores(model, tokenizer, padding, [texts[place] for place in places], self.max_tokens)
            for place, value in zip(places, values, strict=True):
                if not math.isfinite(value):
                    raise _not_finite(self.path, value, items[place].completion)
                scores[place] = value
        return scores


SHOWN = 200
FIX = "give the path of a sequence-classification model with its tokenizer"
GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")

PARTS = {"weights": ("*.safetensors", "*.bin"), "tokenizer": ("tokenizer*", "vocab*", "*.model")}
"""The files that a model's folder needs in addition to its configuration: any one of each kind."""


def _from_hub(path: str) -> Path:
    """The configuration of a model by hub name, fetched if it is not in the cache."""
    folder = Path(path).expanduser()
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        siblings = [other.name for other in folder.parent.glob("*")] if folder.parent.is_dir() else []
        raise UserError(f"there is no folder '{path}' with a reward model", fix=nearest(folder.name, siblings))
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, "config.json"))
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"the reward model '{path}' is neither a folder nor found on the hub ({reason})"
        raise UserError(what, fix=FIX) from error


def _read_config(path: str, file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"the reward model '{path}' has no configuration that can be read", fix=FIX) from error


def _too_many(path: str, outputs: int) -> UserError:
    return UserError(f"the reward model '{path}' has {outputs} outputs", fix="use a model with one output")


def _not_finite(path: str, value: float, completion: str) -> UserError:
    shown = completion if len(completion) <= SHOWN else completion[:SHOWN] + "..."
    return UserError(
        f"the reward model '{path}' gives the score {value} to the completion {shown!r}, and a reward must be finite",
        fix="check its weights: they may be damaged, or have overflowed in training",
    )


def _check_whole(path: str, file: Path) -> None:
    """Refuse a truncated weights file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except (OSError, SafetensorError) as error:
        raise UserError(f"the weights of the reward model '{path}' are damaged: {file.name} is not whole ({error})",
                        fix="fetch them again") from error  # fmt: skip


@lru_cache(maxsize=2)
def _load(path: str, device: str) -> tuple[Any, Any, int | None]:
    """Model and tokenizer, and the token that the model takes for padding."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"the reward model '{path}' is to run on cuda, but torch finds no GPU", fix="write `device: auto`"
        )
    from lemma.models.load_model import without_tables
    from lemma.models.loading_checks import check_vocabulary, check_weights, loading

    folder = Path(path).expanduser()
    place = str(folder) if folder.is_dir() else path
    model: Any
    tokenizer: Any
    with without_tables(), loading("reward model", path, fix=FIX):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True
        )
        tokenizer = AutoTokenizer.from_pretrained(place)
    if model.config.num_labels != 1:
        raise _too_many(path, model.config.num_labels)
    check_weights(path, info, FIX)
    check_vocabulary(path, model, tokenizer)
    tokenizer.truncation_side = "left"
    padding = model.config.get_text_config().pad_token_id
    if padding is not None and not 0 <= padding < model.get_input_embeddings().weight.shape[0]:
        padding = None
    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(chosen).eval(), tokenizer, padding


def _text(tokenizer: Any, item: RewardInput) -> str:
    """The conversation in the model's own chat template, or question and completion on separate lines."""
    if tokenizer.chat_template:
        turns = [message.as_dict() for message in item.problem.messages]
        turns.append({"role": "assistant", "content": item.completion})
        with rendering("a conversation for the reward model", "repair chat_template in the reward model's folder"):
            return str(tokenizer.apply_chat_template(turns, tokenize=False))
    return item.problem.question + "\n" + item.completion


def _scores(model: Any, tokenizer: Any, padding: int | None, texts: list[str], max_tokens: int) -> list[float]:
    """What the model gives each text by itself, on the ids that transformers gives it."""
    import torch

    # A chat template writes the beginning-of-text token itself.
    has_beginning = bool(tokenizer.chat_template)
    encoded = tokenizer(texts, truncation=True, max_length=max_tokens, add_special_tokens=not has_beginning)
    if padding is None:
        # The score is read at the last token that is not padding, so any token serves that ends no text.
        last = {ids[-1] for ids in encoded["input_ids"] if ids}
        padding = next(token for token in range(len(last) + 1) if token not in last)
        model.config.get_text_config().pad_token_id = padding
    longest = max(map(len, encoded["input_ids"]))
    fill = {"input_ids": padding}
    batch = {
        key: torch.tensor([[*row, *[fill.get(key, 0)] * (longest - len(row))] for row in rows], device=model.device)
        for key, rows in encoded.items()
    }
    with torch.inference_mode():
        logits_B1 = model(**batch).logits
    if logits_B1.shape != (len(texts), 1):
        raise UserError(
            f"the reward model gives scores of shape {tuple(logits_B1.shape)} for {len(texts)} completions", fix=FIX
        )
    return [float(value) for value in logits_B1[:, 0].float()]
