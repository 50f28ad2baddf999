"""Groups made by hand: what the tests of algorithms share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lemma.core.types import Finish, Group, Message, Problem, Trajectory

PROMPT = 2


def trajectory(
    reward: float,
    length: int = 3,
    *,
    given: int = 0,
    finish: Finish = "stop",
    first: int = 5,
    **tokens: Sequence[float],
) -> Trajectory:
    """A prompt of two ids and a response, `given` of its tokens a teacher's; `tokens` are numbers of the response."""
    size = PROMPT + length
    fields = {"off": np.zeros(size)} | {name: np.zeros(size) for name in tokens}
    fields["off"][PROMPT : PROMPT + given] = 1.0
    for name, numbers in tokens.items():
        fields[name][PROMPT:] = numbers
    return Trajectory(
        ids_T=np.arange(first, first + size),
        loss_mask_T=np.arange(size) >= PROMPT,
        rewards={"total": reward},
        finish=finish,
        token_fields=fields,
    )


def group(*trajectories: Trajectory, **extra: object) -> Group:
    return Group(Problem((Message("user", "?"),), ("1",), extra=extra), list(trajectories))


def response(trajectory: Trajectory, name: str) -> list[float]:
    """The numbers of the response's tokens."""
    return trajectory.token_fields[name][PROMPT:].tolist()
