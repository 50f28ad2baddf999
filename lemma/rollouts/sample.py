"""One graded completion: what was asked, what was sampled, how likely it was, what it says and what it is worth.

This is the row of the journal. Arrays are written in base64, exactly; the text stands beside them for people.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lemma.core.types import Finish, Origin, Trajectory

VERSION = 1

VerdictKind = Literal["right", "wrong", "unknown"]
ARRAYS = {"prompt": np.int32, "ids": np.int32, "logprobs": np.float32, "kept": np.float32}


@dataclass(slots=True)
class Sample:
    """`ids` is the whole response; its first `given` tokens were put there by a teacher and were not sampled: their
    log-probabilities are 0 and mean nothing. `verdict` is None where nothing asked the grader, `reward` where no reward
    applies or the verdict is unknown. `gold` are the right answers, for people who read the journal."""

    key: tuple[str | int, ...]
    sample: int
    problem_id: str
    prompt: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray
    finish: Finish
    policy_version: int = 0
    given: int = 0
    text: str = ""
    reasoning: str | None = None
    answer: str | None = None
    gold: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    format_ok: bool = False
    verdict: VerdictKind | None = None
    reason: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    seconds: float = 0.0

    @property
    def origin(self) -> Origin:
        return "teacher" if self.given and self.given == len(self.ids) else "policy"

    @property
    def right(self) -> bool:
        return self.verdict == "right"

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    @property
    def order(self) -> tuple[str, int]:
        """Samples are sorted by this; it does not depend on timing."""
        return (repr(self.key), self.sample)

    @property
    def behaviour(self) -> np.ndarray:
        """Log-probability of each id under the distribution it was drawn from."""
        return self.logprobs - self.kept

    def trajectory(self, unit: int = 0) -> Trajectory:
        """Prompt and response as ids to learn from."""
        zeros = np.zeros(len(self.prompt), dtype=np.float32)
        return Trajectory(
            ids_T=np.concatenate([self.prompt, self.ids]).astype(np.int64),
            chosen_T=np.arange(len(self.prompt) + len(self.ids)) >= len(self.prompt),
            behaviour_T=np.concatenate([zeros, self.behaviour]),
            rewards={name: value for name, value in self.rewards.items() if value is not None}
            | ({} if self.reward is None else {"total": self.reward}),
            origin=self.origin,
            finish=self.finish,
            problem_id=self.problem_id,
            unit=unit,
            policy_version=self.policy_version,
        )

    def to_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"key": list(self.key)}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name in ARRAYS:
                row[name] = base64.b64encode(value.astype(ARRAYS[name]).tobytes()).decode()
            elif name not in ("key", "seconds"):
                row[name] = list(value) if isinstance(value, tuple) else value
        return {**row, "timings": {"seconds": self.seconds}}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Sample:
        """The sample of a row; KeyError, TypeError or ValueError where it is none."""
        values = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        for name, kind in ARRAYS.items():
            values[name] = np.frombuffer(base64.b64decode(row[name]), dtype=kind)
        values |= {"gold": tuple(row.get("gold", ())), "faults": tuple(row["faults"])}
        values |= {"key": tuple(row["key"]), "seconds": row["timings"]["seconds"]}
        sizes = {len(values[name]) for name in ("ids", "logprobs", "kept")}
        if len(sizes) > 1:
            raise ValueError("ids, logprobs and kept differ in length")
        if values.get("reward") is not None and not isinstance(values["reward"], int | float):
            raise TypeError("reward is not a number")
        return cls(**values)
