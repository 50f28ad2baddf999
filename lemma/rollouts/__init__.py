"""Engine, environment, format and rewards together: problems go in, graded episodes come out, and a journal keeps every
one."""

from lemma.rollouts.episode import Episode, Turn
from lemma.rollouts.episode_runner import play
from lemma.rollouts.groups import RolloutCollector, Rollouts
from lemma.rollouts.journal import Journal
from lemma.rollouts.journal_reader import read_episodes
from lemma.rollouts.multi_turn import World
from lemma.rollouts.order import ProblemOrder, Task
from lemma.rollouts.sample_request import SampleRequest
from lemma.rollouts.scorer import Pending, Scorer

__all__ = [
    "Episode",
    "Journal",
    "Pending",
    "ProblemOrder",
    "RolloutCollector",
    "Rollouts",
    "SampleRequest",
    "Scorer",
    "Task",
    "Turn",
    "World",
    "play",
    "read_episodes",
]
