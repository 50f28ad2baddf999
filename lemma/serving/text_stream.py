"""The text of one sample as its tokens arrive: only final text is given out, so the stream adds up to the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are not a whole character (yet)
# Number of tokens after which a partial character is given out as it is.
PATIENCE = 16


class TextStream:
    """Follows one sample. `feed` returns the text that is final by now, `finish` the rest.

    The token that ends the sample is not part of the text. The text ends after a string of `keeps` and before one of
    `cuts`, but not within the first `min_tokens` tokens. `before` are ids that the text goes on from.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        ends: Collection[int],
        *,
        keeps: Sequence[str] = (),
        cuts: Sequence[str] = (),
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ):
        self._decode, self._ends, self._keeps, self._cuts = decode, ends, keeps, cuts
        if decode(before).endswith(UNKNOWN):
            before = ()
        self._ids: list[int] = [*before]
        self._min_tokens = min_tokens + len(before)
        self._held: int | None = None  # an end token, which becomes text only if more follows
        # Ids before `_read` are in the text; those from `_known` on are context.
        self._known, self._read = 0, len(before)
        self._text = ""
        self._over: int | None = None
        self._given = 0
        self._longest = max(map(len, (*keeps, *cuts)), default=0)

    @property
    def text(self) -> str:
        """All text given out so far."""
        return self._text[: self._given]

    def feed(self, ids: Iterable[int]) -> str:
        for token in ids:
            if self._held is not None:
                self._take(self._held)
            self._held = token if token in self._ends else None
            if self._held is None:
                self._take(token)
        return self._give(len(self._text) - self._half_a_cut())

    def finish(self, finish: str) -> str:
        """The rest, including an end token that did not end the sample."""
        if self._held is not None and finish != "stop":
            self._take(self._held)
        self._grow(is_last=True)
        return self._give(len(self._text))

    def _take(self, token: int) -> None:
        self._ids.append(token)
        before = len(self._text)
        self._grow(is_last=len(self._ids) - self._read > PATIENCE)
        if self._over is None and len(self._ids) > self._min_tokens and len(self._text) > before:
            self._look_for_end(before)

    def _grow(self, is_last: bool) -> None:
        """Decode with a few tokens of context: some decoders insert spaces between tokens, others depend on context."""
        known, text = self._decode(self._ids[self._known : self._read]), self._decode(self._ids[self._known :])
        if is_last or not text.endswith(UNKNOWN):
            self._text += text[len(known) :]
            self._known, self._read = self._read, len(self._ids)

    def _look_for_end(self, before: int) -> None:
        """Find the first stop string that ends in the new text."""
        start = max(0, before - self._longest + 1)
        places = [(self._text.find(stop, start), 0) for stop in self._cuts]
        places += [(self._text.find(stop, start), len(stop)) for stop in self._keeps]
        ends = [place + length for place, length in places if place >= 0]
        if ends:
            self._over = min(ends)

    def _half_a_cut(self) -> int:
        """How many characters at the end may be the start of a string of `cuts`."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) and len(stop) > length for stop in self._cuts):
                return length
        return 0

    def _give(self, until: int) -> str:
        until = min(until, len(self._text) if self._over is None else self._over)
        given = self._text[self._given : until]
        self._given = max(self._given, until)
        return given
