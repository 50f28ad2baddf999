"""Engine, environment, format and rewards together: problems go in, graded episodes come out, and a journal keeps every
one."""

from lemma.rollouts.ask import Ask
from lemma.rollouts.episode import Episode, Turn
from lemma.rollouts.groups import Roller, Rollouts
from lemma.rollouts.journal import Journal, read_episodes
from lemma.rollouts.judge import Judge, Pending
from lemma.rollouts.multi_turn import World
from lemma.rollouts.order import ProblemOrder, Task
from lemma.rollouts.play import play

__all__ = [
    "Ask",
    "Episode",
    "Journal",
    "Judge",
    "Pending",
    "ProblemOrder",
    "Roller",
    "Rollouts",
    "Task",
    "Turn",
    "World",
    "play",
    "read_episodes",
]
