"""Engine, format and rewards together: problems go in, graded samples come out, and a journal keeps every one."""

from lemma.rollouts.collect import Ask, collect
from lemma.rollouts.groups import Roller, Rollouts
from lemma.rollouts.journal import Journal, read_samples
from lemma.rollouts.judge import Judge, Pending
from lemma.rollouts.order import ProblemOrder, Task
from lemma.rollouts.sample import Sample

__all__ = [
    "Ask",
    "Journal",
    "Judge",
    "Pending",
    "ProblemOrder",
    "Roller",
    "Rollouts",
    "Sample",
    "Task",
    "collect",
    "read_samples",
]
