"""The text of each token id, fast enough for hundreds of thousands of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer

from lemma.core.errors import UserError
from lemma.models.places import TINY, resolve

# What a decoder writes for bytes that are not a whole character.
TORN = "\ufffd"
# A character has at most four bytes, and a token at least one.
MOST_TOGETHER = 4


class TokenTexts:
    """The text of each id, decoded once."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        # Decoders drop a space in front of the first token: every piece is decoded after this one.
        self._anchor, self._anchor_text = 0, tokenizer.decode([0], skip_special_tokens=False)

    def piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            text = self._tokenizer.decode([self._anchor, token], skip_special_tokens=False)
            piece = self._pieces[token] = text.removeprefix(self._anchor_text)
        return piece

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id. A character made of several tokens belongs to the last of them."""
        known = self._pieces
        pieces = [known[token] if token in known else self.piece(token) for token in ids]
        place = 0 if TORN in "".join(pieces) else len(pieces)
        while place < len(pieces):
            place += self._mend(ids, pieces, place) if TORN in pieces[place] else 1
        return pieces

    def _mend(self, ids: Sequence[int], pieces: list[str], place: int) -> int:
        """Join the tokens from `place` on that make whole characters together; how many they are, 1 where none do."""
        for count in range(2, MOST_TOGETHER + 1):
            together = ids[place : place + count]
            text = self._tokenizer.decode([self._anchor, *together], skip_special_tokens=False)
            if len(together) == count and TORN not in text:
                pieces[place : place + count] = [""] * (count - 1) + [text.removeprefix(self._anchor_text)]
                return count
        return 1

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def load_token_texts(run: Path, stages: Sequence[str], model_path: str) -> TokenTexts | None:
    """The tokenizer of a run: that of a finished stage, or of its first model if that is on this machine."""
    finals = [run / "stages" / name / "final" for name in stages]
    folders = [place for final in finals for place in (final / "merged", final / "adapter", final)]
    if model_path != TINY:
        with suppress(UserError):
            folders.append(_folder_of(resolve(model_path)))
    for folder in folders:
        path = folder / "tokenizer.json"
        if path.is_file():
            return TokenTexts(Tokenizer.from_file(str(path)))
    if model_path == TINY:
        from lemma.models.tiny import tiny_tokenizer

        return TokenTexts(tiny_tokenizer().backend_tokenizer)
    return None


def _folder_of(model: str) -> Path:
    """The folder itself; for a hub name, the folder its tokenizer was downloaded to."""
    from huggingface_hub import try_to_load_from_cache

    if Path(model).exists() or model.count("/") > 1:
        return Path(model)
    cached = try_to_load_from_cache(model, "tokenizer.json")
    return Path(cached).parent if isinstance(cached, str) else Path(model)
