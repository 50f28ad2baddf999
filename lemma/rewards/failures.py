"""What is said of a reward that fails: which one, where it stands, and on which completion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb

from lemma.core.errors import Interruption, UserError
from lemma.rewards.reward import Reward, WrongReturn
from lemma.rewards.reward_input import RewardInput

SHOWN = 2_000
TEXT_OF_INPUT = "a reward function gets a RewardInput: read the text from its `completion`"


class RewardFailed(UserError):
    """A reward raised an exception; `reward` and `completion` say which one and on what input."""

    def __init__(self, reward: Reward, name: str, completion: str, error: BaseException):
        self.reward, self.completion = name, completion
        frames = extract_tb(error.__traceback__)
        file, line = (frames[-1].filename, frames[-1].lineno) if frames else (None, None)
        if reward.place is not None and file is not None and Path(file).parent == Path(__file__).parent:
            file, line = reward.place
        what = (
            str(error) if isinstance(error, WrongReturn) else f"failed with {type(error).__name__}: {_said_by(error)}"
        )
        mistaken = isinstance(error, TypeError | AttributeError) and RewardInput.__name__ in what
        super().__init__(
            f"reward '{name}' {what} on the completion {shown(completion)!r}",
            file=file,
            line=line,
            fix=error.fix if isinstance(error, WrongReturn) else TEXT_OF_INPUT if mistaken else None,
        )


def _said_by(error: BaseException) -> str:
    try:
        return str(error)
    except (KeyboardInterrupt, Interruption):
        raise
    except BaseException as other:  # noqa: BLE001 (a class of somebody's own, which may do anything)
        return f"(and {type(other).__name__} when it was asked why)"


def late(reward: Reward, name: str, items: Sequence[RewardInput]) -> UserError:
    file, line = reward.place or (None, None)
    on = f"the completion {shown(items[0].completion)!r}" if len(items) == 1 else f"each of {len(items)} completions"
    return UserError(
        f"reward '{name}' took longer than {reward.seconds_each:g} s on {on}",
        file=file,
        line=line,
        fix="make it end sooner, or raise its option `seconds`",
    )


def shown(completion: str) -> str:
    return completion if len(completion) <= SHOWN else completion[:SHOWN] + "..."
