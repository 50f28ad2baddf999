"""Do training rows repeat problems of a benchmark? Word for word, or most of their words in the same order.

Two texts are the same if they differ only in white space, case, dollar signs and LaTeX spacing. Otherwise the criterion
is the share of the benchmark problem's n-grams that one training row contains: 0.3 of the word 13-grams of a problem of
26 words or more, 0.75 of the 8-grams of a shorter one (docs/results/contamination.md explains these numbers). N-grams
that many problems or many rows share, such as "where m and n are relatively prime positive integers find", are stock
phrases and do not count, unless a row contains almost all of the problem: many variants of one problem make its own
words common. Problems of fewer than 8 words are only found word for word.

Everything works on hashes of all texts at once: 17,000 rows against 16,000 problems take seconds.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

LONG, SHORT = 13, 8
SHARES = {LONG: 0.3, SHORT: 0.75}
COMMON = 8
"""An n-gram in more texts than this, on either side, is a stock phrase."""
ALMOST_ALL = {LONG: 0.75, SHORT: 0.9}
"""From this share on, n-grams count however many rows contain them."""

_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[bB]igg?[lr]?)(?![a-zA-Z])|\\[,;:! ]|[\s$~]+")
_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_FIGURE = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_LAYOUT = re.compile(
    r"\\(?:(?:begin|end)\{\w+\*?\}|(?:left|right|displaystyle|limits|text|textbf|textit|mathrm|mathbf|mathit|operatorname"
    r"|overline|quad|qquad|[bB]igg?[lr]?)(?![a-zA-Z]))"
)
_WORD = re.compile(r"[^\W\d_]+|\d+")
_SYNONYMS = {
    **{"dfrac": "frac", "tfrac": "frac", "geq": "ge", "geqslant": "ge", "leq": "le", "leqslant": "le", "neq": "ne"},
    **{"rightarrow": "to", "ldots": "dots", "cdots": "dots", "dotsm": "dots"},
}
# Odd factors: multiplying by them modulo 2^64 is invertible.
_NEXT_WORD, _OWNER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class Match(NamedTuple):
    """A training row and the benchmark problem that it repeats, both by index; `share` of the problem's n-grams were
    found."""

    row: int
    problem: int
    kind: Literal["exact", "overlap"]
    share: float


def find_matches(rows: Sequence[str], problems: Sequence[str]) -> list[Match]:
    """Every pair of a training row and a benchmark problem that are the same text or share enough n-grams."""
    mine, my_copies = _without_copies(_numbers(rows))
    theirs, their_copies = _without_copies(_numbers(problems))
    matches: dict[tuple[int, int], Match] = {}
    for match in (*_overlaps(mine, theirs, LONG), *_overlaps(mine, theirs, SHORT), *_same(mine, theirs)):
        for row in my_copies[match.row]:
            for problem in their_copies[match.problem]:
                matches[row, problem] = match._replace(row=row, problem=problem)
    return [matches[pair] for pair in sorted(matches)]


def normalised(text: str) -> str:
    """One spelling for a problem, whatever its white space, case and LaTeX spacing."""
    text = _FRACTION.sub(r"\\frac", unicodedata.normalize("NFKC", text))
    return _SPACING.sub("", text).lower().rstrip(".")


def words_of(text: str) -> list[str]:
    """The words and numbers of a problem in order, without figures and LaTeX layout."""
    return _WORD.findall(_LAYOUT.sub(" ", _FIGURE.sub(" ", unicodedata.normalize("NFKC", text))).lower())


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts as numbers: a hash of each whole text, and the hashes of their words, concatenated."""

    whole: np.ndarray
    words: np.ndarray
    lengths: np.ndarray


class _WordHashes(dict[str, int]):
    """The hash of every word, computed when it is first seen; words that mean the same share one."""

    def __missing__(self, word: str) -> int:
        number = self[word] = _hash(_SYNONYMS.get(word, word))
        return number


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _numbers(texts: Sequence[str]) -> _Texts:
    whole, words, lengths = [], [], []
    hashes = _WordHashes()
    for text in texts:
        whole.append(_hash(normalised(text)))
        numbers = [hashes[word] for word in words_of(text)]
        words += numbers
        lengths.append(len(numbers))
    return _Texts(np.array(whole, dtype=np.uint64), np.array(words, dtype=np.uint64), np.array(lengths, dtype=np.int64))


def _without_copies(texts: _Texts) -> tuple[_Texts, list[list[int]]]:
    """Each text once, with the indices at which it occurred: copies would make every n-gram look common."""
    whole, first, inverse = np.unique(texts.whole, return_index=True, return_inverse=True)
    copies: list[list[int]] = [[] for _ in first]
    for place, text in enumerate(inverse.tolist()):
        copies[text].append(place)
    starts = np.cumsum(texts.lengths) - texts.lengths
    spans = [texts.words[starts[place] : starts[place] + texts.lengths[place]] for place in first.tolist()]
    return _Texts(whole, np.concatenate([texts.words[:0], *spans]), texts.lengths[first]), copies


def _same(rows: _Texts, problems: _Texts) -> list[Match]:
    _, mine, theirs = np.intersect1d(rows.whole, problems.whole, assume_unique=True, return_indices=True)
    return [Match(row, problem, "exact", 1.0) for row, problem in zip(mine.tolist(), theirs.tolist(), strict=True)]


def _overlaps(rows: _Texts, problems: _Texts, n: int) -> list[Match]:
    """Pairs in which a row contains enough n-grams of a problem, among problems of the length that n is meant for."""
    is_long = problems.lengths >= 2 * LONG
    grams, of_problem = _grams(problems, n, is_long if n == LONG else ~is_long)
    mine, of_row = _grams(rows, n)
    known = np.unique(grams)
    is_known = _within(mine, known)
    grams, of_problem = _once(grams, of_problem)
    mine, of_row = _once(mine[is_known], of_row[is_known])
    known = known[~_within(known, _common(grams))]
    telling = known[~_within(known, _common(mine))]
    matches: dict[tuple[int, int], Match] = {}
    for counted, share in ((known, ALMOST_ALL[n]), (telling, SHARES[n])):
        for match in _enough(mine, of_row, grams, of_problem, counted, share):
            matches[match.row, match.problem] = match
    return list(matches.values())


def _common(grams: np.ndarray) -> np.ndarray:
    values, counts = np.unique(grams, return_counts=True)
    return np.asarray(values[counts > COMMON])


def _enough(
    mine: np.ndarray, of_row: np.ndarray, grams: np.ndarray, of_problem: np.ndarray, counted: np.ndarray, share: float
) -> list[Match]:
    """Pairs in which the row contains this share of the problem's counted n-grams."""
    in_rows, in_problems = _within(mine, counted), _within(grams, counted)
    grams, of_problem = grams[in_problems], of_problem[in_problems]
    pair_rows, pair_problems, counts = _pairs(mine[in_rows], of_row[in_rows], grams, of_problem)
    shares = counts / np.bincount(of_problem, minlength=1)[pair_problems]
    enough = shares >= share
    pairs = zip(pair_rows[enough].tolist(), pair_problems[enough].tolist(), shares[enough].tolist(), strict=True)
    return [Match(row, problem, "overlap", part) for row, problem, part in pairs]


def _grams(texts: _Texts, n: int, meant: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The n-grams of each selected text, as hashes, and the text that each belongs to."""
    count = max(0, len(texts.words) - n + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for place in range(n):
        hashes = hashes * _NEXT_WORD + texts.words[place : place + count]
    owner = np.repeat(np.arange(len(texts.lengths)), texts.lengths)
    first, last = owner[:count], owner[n - 1 : n - 1 + count]
    within = first == last if meant is None else (first == last) & meant[first]
    return hashes[within], first[within]


def _once(grams: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each n-gram of a text once."""
    _, first = np.unique(grams ^ (owner.astype(np.uint64) * _OWNER), return_index=True)
    return grams[first], owner[first]


def _within(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Which of the values are in a sorted array."""
    if len(ordered) == 0:
        return np.zeros(len(values), dtype=bool)
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[places] == values)


def _pairs(
    mine: np.ndarray, of_row: np.ndarray, grams: np.ndarray, of_problem: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each pair of a row and a problem that have n-grams in common, and how many."""
    order = np.argsort(grams, kind="stable")
    ordered = grams[order]
    begins, ends = np.searchsorted(ordered, mine, "left"), np.searchsorted(ordered, mine, "right")
    times = ends - begins
    offsets = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    problems = of_problem[order[np.repeat(begins, times) + offsets]]
    width = int(of_problem.max(initial=0)) + 1
    pairs, counts = np.unique(np.repeat(of_row, times) * width + problems, return_counts=True)
    return pairs // width, pairs % width, counts
