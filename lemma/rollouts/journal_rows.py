"""Episodes as rows of the journal, written; `journal_reader` reads them. A row has the fields of an episode, and of its
turns; arrays are in base64, exactly, and a turn's seconds under `timings`.

A line is what `json.dumps` makes of a row, byte for byte, in less time: most of it are arrays, which need no escaping,
and what the attempts at one problem share.
"""

from __future__ import annotations

import json
import math
from binascii import b2a_base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from json.encoder import encode_basestring
from operator import attrgetter
from typing import Any

import numpy as np

from lemma.rollouts.episode import Episode, Turn

VERSION = 2
ARRAYS = {"context": np.int32, "ids": np.int32, "logprobs": np.float32, "kept": np.float32}
OF_TURN = tuple(one.name for one in fields(Turn))
OF_EPISODE = tuple(one.name for one in fields(Episode))

# Problems of which the shared part is remembered.
MOST_SHARED = 256

_SAID = tuple(name for name in OF_TURN if name not in ARRAYS)
_TEXT = _SAID.index("text")
_SHARED = ("turns", "question", "reasoning")
_OWN = tuple(name for name in OF_EPISODE if name not in _SHARED)
_arrays_of, _said_of, _own_of = attrgetter(*ARRAYS), attrgetter(*_SAID), attrgetter(*_OWN)


def _template(names: Iterable[str], value: str = "%s") -> str:
    return ", ".join(f'"{name}": {value}' for name in names)


assert _SAID[-1] == "seconds", "what a row says of time stands at its end"
_QUOTED = '"%s"'
_TURN = f'{{{_template(ARRAYS, _QUOTED)}, {_template(_SAID[:-1])}, "timings": {{"seconds": %s}}}}'
_EPISODE = f'{{"version": {VERSION}, {_template(OF_EPISODE)}}}'
_PLACES = [(_SHARED + _OWN).index(name) for name in OF_EPISODE]


@dataclass
class RowWriter:
    """Writes rows, and remembers of the last problems what their attempts share: the prompt and the question."""

    # By identity; with the object itself, whose place no other one can take meanwhile.
    _shared: dict[int, tuple[Any, str]] = field(default_factory=dict)

    def line(self, episode: Episode) -> str:
        """The line of an episode, without its end."""
        turns, text = [], ""
        for turn in episode.turns:
            row, text = self._turn(turn)
            turns.append(row)
        # Where a format finds no answer, all that was said is reasoning.
        is_all = episode.reasoning is not None and episode.reasoning == episode.turns[-1].text
        reasoning = text if is_all else _json([episode.reasoning])[0]
        question = self._once(episode.question, lambda: _json([episode.question])[0])
        values = [f"[{', '.join(turns)}]", question, reasoning, *_json(_own_of(episode))]
        return _EPISODE % tuple([values[place] for place in _PLACES])

    def _turn(self, turn: Turn) -> tuple[str, str]:
        """The row of a turn, and its text as it stands there."""
        context, *others = map(np.asarray, _arrays_of(turn), ARRAYS.values())
        prompt = self._once(context, lambda: _base64([context])[0])
        said = _json(_said_of(turn))
        return _TURN % (prompt, *_base64(others), *said), said[_TEXT]

    def _once(self, value: Any, write: Callable[[], str]) -> str:
        known = self._shared.get(id(value))
        if known is None:
            if len(self._shared) >= 2 * MOST_SHARED:
                self._shared.clear()
            known = self._shared[id(value)] = value, write()
        return known[1]


def _base64(arrays: Iterable[np.ndarray]) -> list[str]:
    return [str(b2a_base64(values.tobytes(), newline=False), "ascii") for values in arrays]


def _json(values: Iterable[Any]) -> list[str]:
    return [_KINDS.get(type(value), _others)(value) for value in values]


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else _others(value)


def _tuple(values: tuple[Any, ...]) -> str:
    return f"[{', '.join([_KINDS.get(type(value), _others)(value) for value in values])}]" if values else "[]"


_others = json.JSONEncoder(ensure_ascii=False).encode
_KINDS: dict[type, Callable[[Any], str]] = {
    str: encode_basestring,
    bool: {False: "false", True: "true"}.__getitem__,
    int: repr,
    float: _number,
    type(None): {None: "null"}.__getitem__,
    tuple: _tuple,
}
